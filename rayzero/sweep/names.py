"""What tells a cell's name from its siblings': the values that differ from what all cells share."""

import re
from collections.abc import Iterator, Mapping

NAMED_ALREADY = (
    "zero.stage",
    "parallel.tp",
    "parallel.replicate",
    "precision.name",
    "model.name",
    "engine.name",
    "offload.optimizer",
    "offload.params",
)
NO_PART_OF_A_NAME = (
    "experiment.",
    "tracking.",
    "cluster.hardware.",
    "run.output",
    "offload.folder",
)
NOT_IN_FILE_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def varied_suffix(cell: Mapping[str, object], shared: Mapping[str, object]) -> str:
    """Return what to append to a cell's name, such as _lr0.001, so that siblings differ."""
    common = dict(leaves(shared))
    words = [
        f"_{key.rpartition('.')[2]}{NOT_IN_FILE_NAMES.sub('-', str(value))}"
        for key, value in leaves(cell)
        if value != common.get(key) and _tells(key, cell, shared)
    ]
    return "".join(words)


def leaves(plain: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted keys with their values."""
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _tells(key: str, cell: Mapping[str, object], shared: Mapping[str, object]) -> bool:
    """Whether a differing key belongs into the name: not if a preset's name stands for it."""
    if key in NAMED_ALREADY or key.startswith(NO_PART_OF_A_NAME):
        return False
    group = key.partition(".")[0]
    named = f"{group}.name"
    is_preset = group in ("model", "precision", "engine")
    return not (is_preset and dict(leaves(cell))[named] != dict(leaves(shared))[named])
