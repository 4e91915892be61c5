"""Claims group: what claims on ZeRO are decided with."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsConfig:
    """The verb claims alone reads these."""

    measure: bool = True
    """Run the experiments on 2, 4 and 8 CPU ranks of this machine through Ray; else only what
    formulas and published figures decide."""
    only: list[int] = field(default_factory=list)
    """Numbers of the claims to decide, with the experiments these read alone; empty: all."""
