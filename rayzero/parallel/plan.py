"""A plan says how each layer is cut: patterns of module names, in order, and a style for each."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from rayzero.config.parallel import Style
from rayzero.errors import ConfigError

Plan = Mapping[str, Style]
"""fnmatch patterns of module names; the first that matches counts."""

Heads = Mapping[str, int]
"""fnmatch patterns of linears whose outputs are so many heads: no head is ever cut."""


def styled(module: nn.Module, plan: Plan) -> Iterator[tuple[str, Style]]:
    """Yield each module that the plan names; raise ConfigError where a pattern names none."""
    names = [name for name, _ in module.named_modules() if name]
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"the tensor-parallel plan names {pattern!r}, which no module of "
                f"{type(module).__name__} matches; its modules: {', '.join(names[:12])} ..."
            )
    for name in names:
        style = next((plan[p] for p in plan if fnmatchcase(name, p)), Style.REPLICATE)
        if style is not Style.REPLICATE:
            yield name, style


def heads_of(name: str, heads: Heads) -> int | None:
    """Return how many heads a linear's outputs are, None where it is not said."""
    return next((heads[p] for p in heads if fnmatchcase(name, p)), None)
