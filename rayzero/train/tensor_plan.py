"""The tensor-parallel plan of a model that is not ours: the config's, or the one it ships.

A model ships a plan by two methods: tensor_plan() -> {pattern of module names: style}, and
tensor_heads() -> {pattern of linears: number of heads}.
"""

from dataclasses import dataclass

from torch import nn

from rayzero.config.cell import CellConfig
from rayzero.config.parallel import Style
from rayzero.errors import ConfigError
from rayzero.parallel.plan import Heads, Plan
from rayzero.parallel.suggest import plan_as_yaml, suggested_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Styles of modules, and where heads are."""

    styles: Plan
    heads: Heads


def plan_of(config: CellConfig, module: nn.Module) -> TensorPlan:
    """Return the plan; raise ConfigError, with a plan to start from, where there is none."""
    parallel = config.parallel
    if parallel.plan:
        return TensorPlan(styles=parallel.plan, heads=parallel.heads)
    ships = callable(getattr(module, "tensor_plan", None))
    shipped: dict[str, str] = module.tensor_plan() if ships else {}  # type: ignore[operator]
    if not shipped:
        raise ConfigError(
            f"parallel.tp={parallel.tp} needs a plan, and {config.model.factory} ships none. A "
            "guess from its names and sizes, to be checked and put into the config (with "
            "parallel.heads for query, key and value):\n" + plan_as_yaml(suggested_plan(module))
        )
    heads: Heads = module.tensor_heads()  # type: ignore[operator]
    for pattern, number in heads.items():
        if number % parallel.tp:
            raise ConfigError(
                f"parallel.tp={parallel.tp} does not divide the {number} heads of {pattern}; "
                "choose a tp that does, or give parallel.plan"
            )
    return TensorPlan(styles={p: Style(s) for p, s in shipped.items()}, heads=heads)
