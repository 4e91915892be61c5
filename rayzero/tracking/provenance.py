"""Who wrote a run: the driver process, its host, its command, and the checkout it came from."""

import getpass
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from rayzero import __version__

SAME_START_S = 1.0


def driver_tags() -> dict[str, str]:
    """Tags that tell a later start whether this process still lives."""
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "driver_pid": str(process.pid),
        "driver_start_unix_s": f"{process.create_time():.3f}",
    }


def is_dead_driver(tags: dict[str, str]) -> bool:
    """Tell whether tags name a process of this host that is gone; False where that is unknown."""
    try:
        pid, start = int(tags["driver_pid"]), float(tags["driver_start_unix_s"])
    except (KeyError, ValueError):
        return False
    if tags.get("host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(pid)
        same_start = abs(process.create_time() - start) <= SAME_START_S
        return not same_start or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def origin_tags() -> dict[str, str]:
    """Tags that say what was run: command, user, and the commit if this is a git checkout."""
    command = shlex.join(sys.orig_argv)
    tags = {
        "command": command,
        "mlflow.user": _user(),
        "mlflow.source.name": f"rayzero {__version__}",
        "mlflow.source.type": "LOCAL",
    }
    return tags | git_tags(Path(__file__).parent)


def git_tags(folder: Path) -> dict[str, str]:
    """Return commit and dirty flag of the checkout that tracks this folder's files, else nothing.

    An installed package inside somebody's checkout (a .venv there) is not tracked by it.
    """
    if not _git(folder, "ls-files", "."):
        return {}
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    dirty = _git(folder, "status", "--porcelain")
    return {
        "git_commit": commit,
        "git_dirty": str(bool(dirty)).lower(),
        "mlflow.source.git.commit": commit,
    }


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
