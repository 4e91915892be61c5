"""A plan says how each layer of a module is cut: patterns of module names, in order, and a style.

[Note: one copy for several linears] Column-cut linears compute without communication. The module
around them has style COPY_INPUT, which sums their input's gradient once for all of them: query, key
and value share one all-reduce.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase

from torch import nn

from rayzero.errors import ConfigError


class Style(Enum):
    """What tensor parallelism does with one module."""

    COPY_INPUT = "copy_input"
    """Its first input is whole and used by split layers inside: its gradient is summed."""
    COLUMN = "column"
    """Linear: each rank computes a block of the outputs."""
    ROW = "row"
    """Linear: each rank has a block of the inputs; the outputs are summed."""
    VOCAB = "vocab"
    """Embedding: each rank holds a block of the rows; the outputs are summed."""
    VOCAB_OUTPUT = "vocab_output"
    """Linear to the vocabulary: column, with the input's gradient summed."""
    VOCAB_LOSS = "vocab_loss"
    """Cross-entropy over logits that VOCAB_OUTPUT left split."""
    REPLICATE = "replicate"
    """Every rank holds and computes all of it; so does what no pattern names."""


Plan = Mapping[str, Style]
"""fnmatch patterns of module names; the first that matches counts."""


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
