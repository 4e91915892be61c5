"""Transfers of tensor parallelism in one step: Megatron's four all-reduces per layer.

For each micro-batch, two in forward (after attention and after the feed-forward part) and two in
backward (at their inputs), each of b s h elements (Shoeybi et al., arXiv:1909.08053, section 3);
plus the embedding's, the output layer's and the loss', and what recomputation repeats.
"""

from collections.abc import Iterator

from rayzero.config.cell import CellConfig
from rayzero.config.model import Checkpointing
from rayzero.layout import volume
from rayzero.layout.dtypes import ITEMSIZE
from rayzero.records import Phase, Transfer
from rayzero.theory.question import Question


def tp_transfers(config: CellConfig, question: Question, micro_steps: int) -> tuple[Transfer, ...]:
    """List the tp transfers of a step of our transformer."""
    if question.tp == 1 or config.model.factory is not None:
        return ()
    dp = question.shards * (1 if question.stage == 0 else question.replicate)
    micro_batch = config.data.global_batch // dp // micro_steps
    one = tuple(_micro_step(config, question, micro_batch * config.data.seq_len))
    return one * micro_steps


def _micro_step(config: CellConfig, question: Question, tokens: int) -> Iterator[Transfer]:
    activations = tokens * config.model.hidden
    dtype = config.precision.params.value
    exact = dtype if dtype == "fp64" else "fp32"
    forward, backward = Phase.FORWARD, Phase.BACKWARD

    def reduced(unit: str, phase: Phase, elements: int, kind: str) -> Transfer:
        sent = volume.all_reduced(elements, ranks=question.tp, index=question.tp_index)
        return Transfer(
            op="all_reduce",
            axis="tp",
            phase=phase,
            unit=unit,
            elements=elements,
            dtype=kind,
            sent_bytes=sent * ITEMSIZE[kind],
        )

    yield reduced("tokens", forward, activations, dtype)
    for index in range(config.model.num_layers):
        block = f"blocks.{index}"
        yield reduced(f"{block}.attention.o", forward, activations, dtype)
        yield reduced(f"{block}.feed_forward.down", forward, activations, dtype)
        yield reduced(f"{block}.feed_forward", backward, activations, dtype)
        yield reduced(f"{block}.attention", backward, activations, dtype)
        if config.model.checkpointing is Checkpointing.FULL:
            # Recomputation ends before the block's last all-reduce, whose result nothing needs.
            yield reduced(f"{block}.attention.o", backward, activations, dtype)
    yield reduced("loss.max", forward, tokens, exact)
    yield reduced("loss.sum", forward, 2 * tokens, exact)
    yield reduced("output", backward, activations, dtype)
