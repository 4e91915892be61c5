"""When is a cell already answered? If config, sources, torch and hardware are those of then."""

import copy
import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version

from rayzero.config.build import Plain
from rayzero.records import CellRecord, Status
from rayzero.sources import sources_hash

ANSWERED = (Status.OK.value, Status.IMPOSSIBLE.value)

NOT_ASKED = {
    "run": (
        "output",
        "resume",
        "fail_fast",
        "cell_timeout_s",
        "checkpoint_folder",
        "checkpoint_every_steps",
        "checkpoint_keep",
        "restore",
    ),
    "offload": ("folder",),
    "cluster": ("start_timeout_s",),
    "experiment": ("name", "question"),
    "tracking": ("enabled", "uri"),
}
"""Keys that change where and how a cell is run, not what it answers."""


def fingerprint(config: Mapping[str, object], *, hardware: str) -> str:
    """Hash all that an answer depends on."""
    asked = _asked(config)
    parts = {
        "config": asked,
        "sources": sources_hash(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "hardware": hardware,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_answered(record: CellRecord | None, asked: str) -> bool:
    """Whether an earlier record answers the same question."""
    return record is not None and record.fingerprint == asked and record.row.status in ANSWERED


def _asked(config: Mapping[str, object]) -> Plain:
    asked = copy.deepcopy(dict(config))
    for group, keys in NOT_ASKED.items():
        values = asked[group]
        assert isinstance(values, dict), f"config group {group} is {type(values).__name__}"
        for key in keys:
            values.pop(key, None)
    return asked
