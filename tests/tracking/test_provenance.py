"""Who wrote a run: the right commit or none, and a driver that is told alive from dead."""

import subprocess
from pathlib import Path

from rayzero.tracking.provenance import driver_tags, git_tags, is_dead_driver


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder of the test."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def checkout(folder: Path) -> Path:
    """Make a repository with one committed file in package/."""
    (folder / "package").mkdir()
    (folder / "package" / "a.py").write_text("a = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    return folder / "package"


def test_commit_and_changes_of_a_checkout_are_tags(tmp_path: Path) -> None:
    package = checkout(tmp_path)
    clean = git_tags(package)
    assert clean["git_commit"] == git(tmp_path, "rev-parse", "HEAD")
    assert clean["git_dirty"] == "false"
    (package / "a.py").write_text("a = 2\n")
    assert git_tags(package)["git_dirty"] == "true"


def test_a_package_installed_inside_a_foreign_checkout_has_no_commit(tmp_path: Path) -> None:
    checkout(tmp_path)
    installed = tmp_path / ".venv" / "rayzero"
    installed.mkdir(parents=True)
    (installed / "a.py").write_text("a = 1\n")
    assert git_tags(installed) == {}


def test_a_folder_outside_any_checkout_has_no_commit(tmp_path: Path) -> None:
    assert git_tags(tmp_path) == {}


def test_this_process_is_alive_and_its_number_with_another_start_is_dead() -> None:
    tags = driver_tags()
    assert not is_dead_driver(tags)
    earlier = float(tags["driver_start_unix_s"]) - 3600
    assert is_dead_driver(tags | {"driver_start_unix_s": str(earlier)})


def test_a_process_that_is_gone_is_dead() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert is_dead_driver(driver_tags() | {"driver_pid": str(ended.pid)})


def test_a_driver_of_another_host_or_without_tags_is_never_called_dead() -> None:
    assert not is_dead_driver(driver_tags() | {"host": "elsewhere", "driver_pid": "1"})
    assert not is_dead_driver({"host": driver_tags()["host"]})
