"""A built wheel is whole: it carries conf/ and the launcher, and works from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def ran(*command: str, cwd: Path, **environment: str) -> str:
    """Run Python with these arguments; return what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_installed_wheel_composes_and_plans_from_any_folder(tmp_path: Path) -> None:
    wheels, site, elsewhere = (tmp_path / name for name in ("wheels", "site", "elsewhere"))
    elsewhere.mkdir()
    ran(
        "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(ROOT), cwd=tmp_path
    )
    (wheel,) = wheels.glob("*.whl")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site))
    ran(*pip, str(wheel), cwd=tmp_path)
    script = (
        "import rayzero.app as app, sys;"
        "assert app.__file__.startswith(sys.argv[1]), app.__file__;"
        "assert app.conf_folder().is_relative_to(sys.argv[1]), app.conf_folder();"
        "sys.exit(app.main(['sweep', '--cfg', 'job']))"
    )
    said = ran("-P", "-c", script, str(site), cwd=elsewhere, PYTHONPATH=str(site))
    assert "zero_vs_tp" in said
    assert not list(elsewhere.iterdir())
