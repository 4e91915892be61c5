"""Where and with what bench ran: a figure without its machine says nothing."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rayzero.config.cell import CellConfig
from rayzero.tracking.provenance import git_tags

PACKAGES = ("torch", "deepspeed", "ray", "rayzero")


def describe_machine(config: CellConfig, hardware: str, world: int) -> list[str]:
    """Return sentences on hardware, versions, load and what all engines were given."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    commit = git_tags(Path(__file__).parent)
    source = f"; commit {commit['git_commit'][:12]}" if commit else ""
    source += " with local changes" if commit.get("git_dirty") == "true" else ""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    threads = config.cluster.threads_per_rank
    processes = "in each of them new processes for" if config.bench.fresh else "in one process for"
    return [
        f"{hardware}; {world} ranks with {threads} thread{'s' if threads > 1 else ''} each; "
        f"load average at the start {load}.",
        f"{when}; {platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"{', '.join(_version(name) for name in PACKAGES)}{source}.",
        f"Model {config.model.name}; rounds: {config.bench.rounds}, {processes} every engine; "
        f"steps of warm-up, left out: {config.run.warmup_steps}; timed steps: "
        f"{config.run.num_steps} divided by the accumulation, at least one.",
    ]


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} not installed"
