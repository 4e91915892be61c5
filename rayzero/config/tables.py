"""Tables group: what the ZeRO paper's tables are laid beside."""

from dataclasses import dataclass

from rayzero.config.checks import require

BYTES_PER_PARAM = (16, 18, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesConfig:
    """The verb tables alone reads these."""

    bytes_per_param: int = 16
    """Convention of the formulas: 16, 18 or 20, see docs/bytes_per_parameter.md."""
    dryrun: bool = True
    """Play the engine at the papers' sizes: minutes of CPU time."""
    measure: bool = True
    """Run scaled-down cells on 1, 2 and 4 ranks of this machine through Ray."""

    def __post_init__(self) -> None:
        require(
            self.bytes_per_param in BYTES_PER_PARAM,
            f"tables.bytes_per_param={self.bytes_per_param} is unknown; "
            f"allowed: {', '.join(map(str, BYTES_PER_PARAM))}",
        )
