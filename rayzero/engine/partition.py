"""Find the units that stage 3 gathers as one: repeated blocks, what a user names, else by size."""

from collections import Counter
from collections.abc import Sequence

from torch import nn

from rayzero.errors import ConfigError

SMALL_ELEMENTS = 2**16
"""A module outside repeated blocks of at most this size is one unit with its children."""


def find_units(module: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Return the names of unit modules, in registration order; "" is the root.

    Every parameter belongs to the innermost unit above it. A child of a container that repeats one
    class is a block; a remaining module is a unit when it is small or has nothing but parameters of
    its own; what is left over, such as parameters right on the root, goes to the root's unit.
    """
    if names is None:
        found: list[str] = []
        _walk(module, "", found)
    else:
        known = {name for name, _ in module.named_modules()}
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"zero.units names {name!r}, which is no module; known: "
                    f"{', '.join(sorted(known))}"
                )
        found = list(names)
    order = {name: i for i, (name, _) in enumerate(module.named_modules())}
    return sorted({*found, ""}, key=lambda name: order[name])


def unit_of(parameter_name: str, units: Sequence[str]) -> str:
    """Return the innermost unit above a parameter."""
    owner = parameter_name.rpartition(".")[0]
    while owner and owner not in units:
        owner = owner.rpartition(".")[0]
    return owner


def own_parameters(part: nn.Module, name: str, units: Sequence[str]) -> list[nn.Parameter]:
    """List parameters that a unit's module uses itself, not through a unit inside it."""
    prefix = f"{name}." if name else ""
    inner = [unit for unit in units if unit != name and unit.startswith(prefix)]
    found: list[nn.Parameter] = []
    for path, owner in part.named_modules():
        full = prefix + path if path else name
        if not any(full == unit or full.startswith(f"{unit}.") for unit in inner):
            found += [p for p in owner._parameters.values() if p is not None]
    return found


def _walk(module: nn.Module, name: str, found: list[str]) -> None:
    children = [(k, c) for k, c in module.named_children() if _numel(c) and not _holds_only(c)]
    called = bool(name) and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    repeated = _repeated(module)
    if called and not repeated and (not children or _numel(module) <= SMALL_ELEMENTS):
        found.append(name)
        return
    for key, child in children:
        path = f"{name}.{key}" if name else key
        if key in repeated:
            found.append(path)
        else:
            _walk(child, path, found)
    if called and _has_own(module):
        found.append(name)


def _repeated(module: nn.Module) -> set[str]:
    """Return the children that are blocks: of one class, in a container, made of modules."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return set()
    kinds = Counter(type(child) for child in module.children())
    return {
        key
        for key, child in module.named_children()
        if kinds[type(child)] > 1 and any(True for _ in child.children())
    }


def _holds_only(module: nn.Module) -> bool:
    """Whether a module is a list of parameters, which its parent uses and nobody calls."""
    return isinstance(module, nn.ParameterList | nn.ParameterDict)


def _has_own(module: nn.Module) -> bool:
    lists = [c for c in module.children() if _holds_only(c)]
    return any(_numel(c) for c in lists) or any(True for _ in module.parameters(recurse=False))


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
