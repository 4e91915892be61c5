"""The verb doctor: can this machine run what the config asks? Each check is tried, none assumed."""

import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rayzero.cluster.inventory import survey
from rayzero.cluster.session import open_session
from rayzero.config.cell import CellConfig
from rayzero.config.cluster import ClusterKind
from rayzero.errors import ConfigError, RayzeroError
from rayzero.tracking.mlflow_tracker import open_tracker

GIB = 1 << 30
PACKAGES = ("rayzero", "torch", "ray", "hydra-core", "mlflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found; text says what to do where it is not well."""

    check: str
    is_well: bool
    text: str


def main(config: CellConfig) -> int:
    """Print a short table; return 0 if all is well."""
    output = Path(config.run.output)
    findings = [
        _tried("versions", _versions),
        _tried("machine", _machine),
        _tried(f"folder {output}", lambda: _folder(output)),
        _tried("MLflow", lambda: _mlflow(config)),
        _tried(f"Ray (cluster={config.cluster.name})", lambda: _cluster(config)),
    ]
    table = Table("check", "", "found")
    for finding in findings:
        table.add_row(finding.check, "ok" if finding.is_well else "NOT OK", finding.text)
    Console().print(table)
    return 0 if all(finding.is_well for finding in findings) else 1


def _tried(check: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(check=check, is_well=True, text=look())
    except (RayzeroError, OSError, PackageNotFoundError) as error:
        return Finding(check=check, is_well=False, text=str(error))


def _versions() -> str:
    packages = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    return f"Python {platform.python_version()}, {packages}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        if name == "rayzero":
            return "(not installed, run from its checkout)"
        raise


def _machine() -> str:
    found = survey()
    memory = f"{found.host_memory_bytes / GIB:.1f} GiB RAM"
    gpus = f"{found.num_gpus} x {found.device_name}" if found.num_gpus else "no GPU"
    return f"{sys.platform}, {found.num_cores} cores ({found.cpu_name}), {memory}, {gpus}"


def _folder(output: Path) -> str:
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output):
        return "writable"


def _mlflow(config: CellConfig) -> str:
    if not config.tracking.enabled:
        return "switched off (tracking.enabled=false)"
    with open_tracker(config.tracking, Path(config.run.output)):
        return config.tracking.uri or "local store in run.output answers"


def _cluster(config: CellConfig) -> str:
    if config.cluster.kind is ClusterKind.PROFILE:
        raise ConfigError("a profile for the planner; nothing runs on it (cluster=local does)")
    with open_session(config.cluster) as session:
        return session.seat(config.cluster).note
