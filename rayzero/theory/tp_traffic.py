"""Transfers of tensor parallelism in one step: Megatron's four all-reduces per layer.

For each micro-batch, two in forward (after attention and after the feed-forward part) and two in
backward (at their inputs), each of b s h elements (Shoeybi et al., arXiv:1909.08053, section 3);
plus the embedding's, the output layer's and the loss', and what recomputation repeats. With
sequence parallelism each all-reduce is an all-gather and a reduce-scatter, one in forward and one
in backward, and what the first linears of a part read is gathered again in backward (Korthikanti et
al., arXiv:2205.05198, section 4.2.2); parameters that all ranks hold whole sum their gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rayzero.config.cell import CellConfig
from rayzero.config.model import Checkpointing, Flavour
from rayzero.layout import volume
from rayzero.layout.crossing import Crossing
from rayzero.layout.dtypes import ITEMSIZE
from rayzero.records import Phase, Transfer
from rayzero.theory.question import Question


def plan_transfers(
    crossings: Sequence[Crossing], config: CellConfig, question: Question, micro_steps: int
) -> tuple[Transfer, ...]:
    """List the tp transfers of a step of any module that was cut by a plan."""
    parts = _micro_step(config, question, micro_steps)
    return tuple(parts.crossed(crossing) for crossing in crossings) * micro_steps


def tp_transfers(config: CellConfig, question: Question, micro_steps: int) -> tuple[Transfer, ...]:
    """List the tp transfers of a step of our transformer."""
    if question.tp == 1:
        return ()
    parts = _micro_step(config, question, micro_steps)
    return tuple(parts.transfers(config.model.num_layers)) * micro_steps


def transformer_sent_bytes(config: CellConfig, question: Question, micro_steps: int) -> int:
    """Sum what they send, without listing every block: all blocks send the same."""
    if question.tp == 1:
        return 0
    parts = _micro_step(config, question, micro_steps)
    none, one = (sum(t.sent_bytes for t in parts.transfers(layers)) for layers in (0, 1))
    return (none + config.model.num_layers * (one - none)) * micro_steps


def _micro_step(config: CellConfig, question: Question, micro_steps: int) -> "MicroStep":
    dp = question.shards * (1 if question.stage == 0 else question.replicate)
    micro_batch = config.data.global_batch // dp // micro_steps
    return MicroStep(config, question, tokens=micro_batch * config.data.seq_len)


@dataclass(frozen=True, slots=True)
class MicroStep:
    """One micro-batch's tp transfers on one rank; tokens: of the whole micro-batch."""

    config: CellConfig
    question: Question
    tokens: int

    def transfers(self, num_layers: int) -> Iterator[Transfer]:
        """All of our transformer with so many blocks."""
        in_sequence = self.config.parallel.sequence
        yield from (self._sequence_stream if in_sequence else self._whole_stream)(num_layers)
        yield from self._loss()

    def _whole_stream(self, num_layers: int) -> Iterator[Transfer]:
        """All-reduces of activations that every rank has whole."""
        forward, backward = Phase.FORWARD, Phase.BACKWARD
        yield self._stream("all_reduce", "tokens", forward)
        for index in range(num_layers):
            block = f"blocks.{index}"
            yield self._stream("all_reduce", f"{block}.attention.o", forward)
            yield self._stream("all_reduce", f"{block}.feed_forward.down", forward)
            yield self._stream("all_reduce", f"{block}.feed_forward", backward)
            yield self._stream("all_reduce", f"{block}.attention", backward)
            if self._recomputes:
                yield self._stream("all_reduce", f"{block}.attention.o", backward)
                if self._recomputes_last:
                    yield self._stream("all_reduce", f"{block}.feed_forward.down", backward)
            yield from self._whole_heads(f"{block}.attention")
        yield self._stream("all_reduce", "output", backward)

    def _sequence_stream(self, num_layers: int) -> Iterator[Transfer]:
        """All-gathers and reduce-scatters of activations of which every rank has its tokens."""
        backward = Phase.BACKWARD
        enter, leave = ("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")
        yield from self._both(leave, "tokens")
        if self._is_gpt2:
            yield from self._positions()
        for index in range(num_layers):
            block = f"blocks.{index}"
            for part, last in (("attention", "o"), ("feed_forward", "down")):
                yield from self._norm(f"{block}.{part}_norm")
                yield from self._both(enter, f"{block}.{part}")
                yield self._stream("all_gather", f"{block}.{part}.again", backward)
                yield from self._both(leave, f"{block}.{part}.{last}")
                if self._is_gpt2:
                    yield self._weights(f"{block}.{part}.{last}.bias", vectors=1)
            if self._recomputes:
                yield self._stream("all_gather", f"{block}.attention", backward)
                yield self._stream("reduce_scatter", f"{block}.attention.o", backward)
                yield self._stream("all_gather", f"{block}.feed_forward", backward)
                if self._recomputes_last:
                    yield self._stream("reduce_scatter", f"{block}.feed_forward.down", backward)
            yield from self._whole_heads(f"{block}.attention")
        yield from self._norm("norm")
        yield from self._both(enter, "output")
        yield self._stream("all_gather", "output.again", backward)

    def _loss(self) -> Iterator[Transfer]:
        """Two small all-reduces of the cross-entropy over a split vocabulary."""
        sums = 3 if self.config.model.label_smoothing else 2
        for unit, numbers in (("loss.max", 1), ("loss.sum", sums)):
            elements = numbers * self.tokens
            yield self._transfer("all_reduce", unit, Phase.FORWARD, elements, self._exact)

    def crossed(self, crossing: Crossing) -> Transfer:
        """All-reduce of a crossing."""
        phase = Phase.BACKWARD if crossing.in_backward else Phase.FORWARD
        elements = crossing.elements * (self.tokens if crossing.per_token else 1)
        dtype = self._exact if crossing.exact else self._dtype
        return self._transfer("all_reduce", crossing.unit, phase, elements, dtype)

    def _both(self, ops: tuple[str, str], unit: str) -> Iterator[Transfer]:
        yield self._stream(ops[0], unit, Phase.FORWARD)
        yield self._stream(ops[1], unit, Phase.BACKWARD)

    def _norm(self, unit: str) -> Iterator[Transfer]:
        yield self._weights(unit, vectors=2 if self._is_gpt2 else 1)

    def _whole_heads(self, attention: str) -> Iterator[Transfer]:
        """Key and value weights that all ranks hold, as there are fewer heads than ranks."""
        model = self.config.model
        if model.kv_heads >= self.question.tp:
            return
        width = model.kv_heads * model.head_dim
        elements = width * (model.hidden + self._is_gpt2)
        for name in ("k", "v"):
            unit = f"{attention}.{name}"
            yield self._transfer("all_reduce", unit, Phase.BACKWARD, elements, self._dtype)

    def _positions(self) -> Iterator[Transfer]:
        """Each rank adds its positions to its tokens; the table's gradient is gathered."""
        elements = self.config.data.seq_len * self.config.model.hidden
        yield self._transfer("all_gather", "positions", Phase.BACKWARD, elements, self._dtype)

    def _weights(self, unit: str, *, vectors: int) -> Transfer:
        elements = vectors * self.config.model.hidden
        return self._transfer("all_reduce", unit, Phase.BACKWARD, elements, self._dtype)

    def _stream(self, op: str, unit: str, phase: Phase) -> Transfer:
        elements = self.tokens * self.config.model.hidden
        return self._transfer(op, unit, phase, elements, self._dtype)

    def _transfer(self, op: str, unit: str, phase: Phase, elements: int, dtype: str) -> Transfer:
        ranks = self.question.tp
        if op == "all_reduce":
            sent = volume.all_reduced(elements, ranks=ranks, index=self.question.tp_index)
        else:
            sent = volume.gathered(elements, ranks=ranks)
        return Transfer(
            op=op,
            axis="tp",
            phase=phase,
            unit=unit,
            elements=elements,
            dtype=dtype,
            sent_bytes=sent * ITEMSIZE[dtype],
        )

    @property
    def _dtype(self) -> str:
        return self.config.precision.params.value

    @property
    def _exact(self) -> str:
        return self._dtype if self._dtype == "fp64" else "fp32"

    @property
    def _is_gpt2(self) -> bool:
        return self.config.model.flavour is Flavour.GPT2

    @property
    def _recomputes_last(self) -> bool:
        """Whether recomputing a block repeats its last transfer.

        It ends at the last tensor that backward needs: a dropout's mask, which lies behind the
        transfer, or else what lies before it.
        """
        return self.config.model.dropout > 0.0

    @property
    def _recomputes(self) -> bool:
        return self.config.model.checkpointing is Checkpointing.FULL
