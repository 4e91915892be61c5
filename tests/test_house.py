"""The house of DESIGN: imports run downward, third parties stay behind fences, rooms stay small."""

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rayzero"
SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if "_conf" not in p.parts)
FILES = [*SOURCES, *sorted((ROOT / "hydra_plugins").rglob("*.py"))]

OPEN_TO_ALL = {"__init__", "config", "records", "errors", "protocol", "sources"}
MAY_IMPORT = {
    "__init__": set(),
    "errors": {"records"},
    "records": set(),
    "sources": set(),
    "protocol": {"records"},
    "config": {"errors"},
    "layout": set(),
    "dist": {"layout"},
    "models": {"layout"},
    "theory": {"layout"},
    "tracking": set(),
    "engine": {"dist", "layout"},
    "parallel": {"dist", "layout"},
    "baselines": {"dist"},
    "report": {"theory", "tracking"},
    "train": {"engine", "parallel", "models", "baselines", "dist", "theory", "layout"},
    "cluster": {"train", "dist"},
    "rows": {"theory"},
    "run": {"rows", "theory", "cluster", "tracking"},
    "doctor": {"theory", "cluster", "tracking"},
    "checkpoint": {"engine"},
    "sweep": {"run", "rows", "theory", "tracking", "report"},
    "studies": {"run", "rows", "theory", "tracking", "report"},
    "app": {"sweep", "studies", "doctor"},
    "__main__": {"app"},
}
"""What each room may import of ours, besides itself and what is open to all."""

FENCES = {
    "ray": {"cluster"},
    "mlflow": {"tracking"},
    "hydra": {"app", "sweep"},
    "omegaconf": {"app", "sweep"},
    "matplotlib": {"report"},
    "torch": {"dist", "models", "parallel", "engine", "baselines", "train"},
    "deepspeed": {"baselines"},
    "transformers": {"models"},
}

MOST_LINES_OF_FILE, MOST_LINES_OF_CLASS, MOST_LINES_OF_FUNCTION, MOST_PARAMETERS = 400, 300, 60, 8


def room_of(path: Path) -> str:
    """Name the package or top-level file that a source file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the dotted names of all imports, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import by whole path, not relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def our_modules(path: Path, known: Collection[str]) -> Iterator[str]:
    """Yield which of our modules a file imports, whether it names them or something in them."""
    for name in imported_modules(path):
        module = name if name in known else name.rpartition(".")[0]
        if module in known:
            yield module


def our_rooms(path: Path) -> set[str]:
    """Name the rooms that a file imports."""
    names = [name.split(".") for name in imported_modules(path) if name.startswith("rayzero.")]
    rooms = {parts[1] for parts in names}
    return {
        room for room in rooms if (PACKAGE / room).exists() or (PACKAGE / f"{room}.py").exists()
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_downward(path: Path) -> None:
    room = room_of(path)
    assert room in MAY_IMPORT, f"{room} has no floor in DESIGN, section 1"
    allowed = {room} | OPEN_TO_ALL | MAY_IMPORT[room]
    if room in OPEN_TO_ALL:
        allowed = {room} | MAY_IMPORT[room]
    assert our_rooms(path) <= allowed


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_third_parties_stay_behind_their_fences(path: Path) -> None:
    used = {name.split(".")[0] for name in imported_modules(path)}
    outside = {name for name in used & FENCES.keys() if room_of(path) not in FENCES[name]}
    assert not outside, f"{room_of(path)} may not import {outside}"


def test_no_file_is_in_an_import_circle() -> None:
    paths = {module_name(path): path for path in SOURCES}
    uses = {name: set(our_modules(path, paths.keys())) - {name} for name, path in paths.items()}
    # Taking away whatever imports nothing that is left: what remains is in a circle or above one.
    left = dict(uses)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"import circle among {sorted(left)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_stay_small(path: Path) -> None:
    text = path.read_text()
    num_lines = text.count("\n")
    assert num_lines <= MOST_LINES_OF_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assert lines_of(node) <= MOST_LINES_OF_CLASS, f"class {node.name}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert lines_of(node) <= MOST_LINES_OF_FUNCTION, f"function {node.name}"
            assert num_parameters(node) <= MOST_PARAMETERS, f"parameters of {node.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_each_file_opens_with_a_sentence_in_ascii(path: Path) -> None:
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring, "the head of the file says what it is for"
    assert text.isascii()


def test_every_test_that_the_engines_list_names_is_there() -> None:
    readme = ROOT / "tests" / "engine" / "README.md"
    named = set(
        re.findall(r"`((?:tests/)?[\w/]*test_\w+(?:\.py)?|tests/\w+/)`", readme.read_text())
    )
    folder = {path.name: path.read_text() for path in readme.parent.glob("test_*.py")}
    functions = {
        name for text in folder.values() for name in re.findall(r"^def (test_\w+)", text, re.M)
    }
    missing = [
        n for n in named if n not in folder and n not in functions and not (ROOT / n).exists()
    ]
    assert not missing, f"{readme} names tests that are not there"
    assert folder.keys() <= named, f"{readme} leaves out {folder.keys() - named}"


def lines_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a definition, decorators aside."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count parameters; keyword-only ones of a constructor do not count."""
    arguments = node.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    named = [] if node.name == "__init__" else arguments.kwonlyargs
    return len([a for a in positional if a not in ("self", "cls")]) + len(named)
