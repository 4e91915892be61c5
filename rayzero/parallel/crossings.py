"""List what a module that was cut by a plan sends, for theory to add up."""

from collections.abc import Iterator

from torch import nn

from rayzero.layout.crossing import Crossing
from rayzero.parallel.entry import unit_of_entry
from rayzero.parallel.layers import (
    ColumnLinear,
    RowLinear,
    SharedWeights,
    VocabEmbedding,
    WholeHeads,
)
from rayzero.parallel.loss import VocabCrossEntropy
from rayzero.parallel.plan import Plan, styled


def crossings_of(module: nn.Module, plan: Plan) -> tuple[Crossing, ...]:
    """List the all-reduces of a micro-batch, where all linears below a module read one tensor."""
    entries: dict[str, Crossing] = {}
    others: list[Crossing] = []
    for name, _ in styled(module, plan):
        target = module.get_submodule(name)
        if isinstance(target, ColumnLinear | WholeHeads):
            unit = unit_of_entry(name)
            width = target.weight.shape[1]
            entries[unit] = Crossing(unit=unit, elements=width, in_backward=True)
        others += _others(target, name)
    return (*entries.values(), *others)


def _others(target: nn.Module, name: str) -> Iterator[Crossing]:
    if isinstance(target, WholeHeads | SharedWeights):
        elements = sum(parameter.numel() for parameter in target.parameters())
        yield Crossing(unit=name, elements=elements, in_backward=True, per_token=False)
    elif isinstance(target, RowLinear):
        yield Crossing(unit=name, elements=target.weight.shape[0], in_backward=False)
    elif isinstance(target, VocabEmbedding):
        yield Crossing(unit=name, elements=target.weight.shape[1], in_backward=False)
    elif isinstance(target, VocabCrossEntropy):
        sums = 3 if target.label_smoothing else 2
        for part, elements in (("max", 1), ("sum", sums)):
            unit = f"{name}.{part}"
            yield Crossing(unit=unit, elements=elements, in_backward=False, exact=True)
