"""Every transfer of one optimizer step, as one rank sends it.

Elements per rank and step, f = (N-1)/N, g backwards, r of them last=True: stage 0 sends 2 r Psi f,
stage 1 (r+1) Psi f, stage 2 (g+1) Psi f, stage 3 3 g Psi f (Rajbhandari et al., arXiv:1910.02054,
section 7: 2, 2, 2, 3 Psi at g = r = 1). Here Psi is counted flat by flat, with its padding.
"""

from collections.abc import Iterable, Iterator

from rayzero.config.cell import CellConfig
from rayzero.layout import volume
from rayzero.layout.dtypes import ITEMSIZE
from rayzero.layout.spec import FlatLayout
from rayzero.records import Carrier, Phase, Transfer
from rayzero.theory.question import Question, counted_question_of
from rayzero.theory.tp_traffic import transformer_sent_bytes

WINDOW_ELEMENTS = 6
"""What data ranks exchange per step: two sums of squares, the weight and three counts, in fp64."""
TP_WINDOW_ELEMENTS = 2
"""What tp ranks exchange per step: the two sums of squares."""


def step_transfers(
    question: Question, *, backwards: int = 1, reductions: int = 1
) -> tuple[Transfer, ...]:
    """List the engine's transfers of a step with this many backwards, `reductions` of them last."""
    found = list(_windows(question))
    for flat in question.layouts:
        found += _flat_transfers(question, flat, backwards, reductions)
    return tuple(t for t in found if t.elements)


def cell_sent_bytes(config: CellConfig, world: int, *, rank: int) -> int:
    """Return what a rank of a cell with our transformer sends in a step, on all axes."""
    question = counted_question_of(config, world=world, rank=rank, carrier=Carrier.NATIVE)
    micro_steps = config.batching(world).accumulation
    total = sent_bytes(_windows(question)) + transformer_sent_bytes(config, question, micro_steps)
    for flat in question.layouts:
        transfers = _flat_transfers(question, flat, backwards=micro_steps, reductions=1)
        total += question.count(flat) * sent_bytes(transfers)
    return total


def sent_bytes(transfers: Iterable[Transfer]) -> int:
    """Sum the bytes this rank sends."""
    return sum(t.sent_bytes for t in transfers)


def _flat_transfers(
    question: Question, flat: FlatLayout, backwards: int, reductions: int
) -> Iterator[Transfer]:
    q = question
    if flat.trained and q.stage > 0 and q.replicate > 1:
        yield _averaged(q, flat)
    if q.shards == 1:
        return
    if flat.trained:
        yield from _reductions(q, flat, backwards, reductions)
        if q.stage in (1, 2) or flat.persistent:
            yield _moved(q, flat, "all_gather", Phase.STEP, flat.dtype)
    if q.is_sharded(flat):
        times = q.uses_of(flat.unit)
        for phase, each in ((Phase.FORWARD, times.forward), (Phase.BACKWARD, times.backward)):
            gather = _moved(q, flat, "all_gather", phase, flat.dtype)
            yield from [gather] * (backwards * each)


def _reductions(
    question: Question, flat: FlatLayout, backwards: int, reductions: int
) -> list[Transfer]:
    dtype = question.dtypes(flat).reduce
    if question.stage == 0:
        return [_moved(question, flat, "all_reduce", Phase.BACKWARD, dtype)] * reductions
    times = reductions if question.stage == 1 else backwards
    return [_moved(question, flat, "reduce_scatter", Phase.BACKWARD, dtype)] * times


def _moved(question: Question, flat: FlatLayout, op: str, phase: Phase, dtype: str) -> Transfer:
    ranks = question.shards
    if op == "all_reduce":
        sent = volume.all_reduced(flat.padded, ranks=ranks, index=question.shard_index)
    else:
        sent = volume.gathered(flat.padded, ranks=ranks)
    return Transfer(
        op=op,
        axis=question.data_axis,
        phase=phase,
        unit=flat.name,
        elements=flat.padded,
        dtype=dtype,
        sent_bytes=sent * ITEMSIZE[dtype],
    )


def _averaged(question: Question, flat: FlatLayout) -> Transfer:
    """One shard of a flat's gradient, averaged over replicas: 2 (R-1)/R Psi/N."""
    dtype, elements = question.dtypes(flat).accumulate, flat.shard_elements
    sent = volume.all_reduced(elements, ranks=question.replicate, index=question.replicate_index)
    return Transfer(
        op="all_reduce",
        axis="replicate",
        phase=Phase.BACKWARD,
        unit=flat.name,
        elements=elements,
        dtype=dtype,
        sent_bytes=sent * ITEMSIZE[dtype],
    )


def _windows(question: Question) -> Iterator[Transfer]:
    replicas = 1 if question.stage == 0 else question.replicate
    axes = (
        (question.data_axis, question.shards, WINDOW_ELEMENTS),
        ("replicate", replicas, WINDOW_ELEMENTS * question.shards),
        ("tp", question.tp, TP_WINDOW_ELEMENTS),
    )
    for axis, ranks, each in axes:
        if ranks > 1:
            yield Transfer(
                op="all_gather",
                axis=axis,
                phase=Phase.CONTROL,
                unit="window",
                elements=each * ranks,
                dtype="fp64",
                sent_bytes=each * (ranks - 1) * ITEMSIZE["fp64"],
            )
