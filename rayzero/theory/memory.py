"""Bytes one rank holds, by kind: ZeRO's table, with padding, buckets and counters named.

With Psi parameters, N shards and K bytes of optimizer state per parameter (12 in mixed precision):
stage 0 holds 2 Psi + 2 Psi + K Psi, stage 1 2 Psi + 2 Psi + K Psi/N, stage 2 2 Psi + (2+K) Psi/N,
stage 3 (4+K) Psi/N (Rajbhandari et al., arXiv:1910.02054, section 5 and figure 1).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rayzero.config.cell import CellConfig
from rayzero.layout.dtypes import ITEMSIZE
from rayzero.layout.spec import FlatLayout
from rayzero.layout.volume import scratch_elements
from rayzero.records import Carrier, Held, Holdings, Kind, Where
from rayzero.theory.question import COUNTER_BYTES, Question, counted_question_of

SUM_BYTES = 8
"""The engine's sum over a flat's bits, by which it sees what users write into parameters."""
STATES = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.MASTER, Kind.MOMENTS)


class Elements(NamedTuple):
    """Elements, of which so many are padding."""

    elements: int
    padding: int


class Alike(NamedTuple):
    """Flats that are treated alike, such as `flat`: their sizes together, whole and own shards."""

    flat: FlatLayout
    num_flats: int
    whole: Elements
    own: Elements


def holdings_of(
    question: Question, *, after_backward: bool = True, after_step: bool = True
) -> Holdings:
    """Return what the rank holds between steps: gradients and buckets live from the first backward,
    moments and counters from the first applied step."""
    groups = _groups(question)
    lines = list(_parameters(question, groups))
    lines += _states(question, groups, after_backward=after_backward, after_step=after_step)
    lines.append(Held(kind=Kind.MODULE_BUFFERS, num_bytes=question.buffers_bytes))
    if after_backward:
        lines.append(Held(kind=Kind.BUCKETS, num_bytes=bucket_bytes(question)))
    staging = parameter_staging_bytes(question) + (staging_bytes(question) if after_step else 0)
    lines.append(Held(kind=Kind.STAGING, where=Where.HOST, num_bytes=staging))
    return _merged(lines)


def parameter_staging_bytes(question: Question) -> int:
    """Bytes between disk and memory for parameters: in each dtype the longest shard on disk."""
    longest: dict[str, int] = {}
    for flat in question.layouts:
        if question.home(flat) is Where.DISK:
            longest[flat.dtype] = max(longest.get(flat.dtype, 0), flat.shard_elements)
    return sum(elements * ITEMSIZE[dtype] for dtype, elements in longest.items())


def staging_bytes(question: Question) -> int:
    """Bytes of the two sets of buffers between disk and memory for the optimizer's states.

    Flats use them in turn. A set has room for the longest master and its moments, in each dtype
    that it meets.
    """
    q = question
    # Of flats that one stands for, two fill both sets; more of them change nothing.
    on_disk = [
        flat
        for flat in q.trained
        if q.where(flat) is Where.DISK
        for _ in range(min(2, q.count(flat)))
    ]
    elements = [flat.shard_elements if q.stage >= 1 else flat.padded for flat in on_disk]
    dtypes = [{q.dtypes(flat).master for flat in on_disk[first::2]} for first in (0, 1)]
    one_of_each = sum(ITEMSIZE[name] for names in dtypes for name in names)
    return max(elements, default=0) * one_of_each * (1 + q.optimizer.moments)


def bucket_bytes(question: Question) -> int:
    """Bytes of send buffers and receive scratch: two of each with overlap, one without.

    Stages 2 and 3 send from a buffer as long as the longest flat; stages 0 and 1 only where the
    wire has another dtype than the sum. Pairwise exchange receives the peers' parts into scratch.
    """
    slots = min(2 if question.overlap else 1, sum(map(question.count, question.trained)))
    buffer: dict[str, int] = {}
    scratch: dict[str, int] = {}
    for flat in question.trained:
        dtypes = question.dtypes(flat)
        name = dtypes.reduce
        if question.stage >= 2 or dtypes.reduce != dtypes.accumulate:
            buffer[name] = max(buffer.get(name, 0), flat.padded)
        scratch[name] = max(scratch.get(name, 0), _scratch(question, flat))
    return slots * sum(n * ITEMSIZE[k] for sizes in (buffer, scratch) for k, n in sizes.items())


def cell_holdings(config: CellConfig, world: int, *, rank: int, carrier: Carrier) -> Holdings:
    """Return what a rank of a cell with our transformer holds between steps."""
    return holdings_of(counted_question_of(config, world=world, rank=rank, carrier=carrier))


def cell_state_bytes(config: CellConfig, world: int) -> int:
    """Return the bytes of model states on rank 0: the least that a cell needs per rank."""
    return cell_holdings(config, world, rank=0, carrier=Carrier.NATIVE).bytes_of(*STATES)


def _groups(question: Question) -> list[Alike]:
    q = question
    found: dict[tuple[str, bool, bool, Where], list[FlatLayout]] = {}
    for flat in q.layouts:
        treatment = (flat.dtype, flat.trained, q.is_sharded(flat), q.where(flat))
        found.setdefault(treatment, []).append(flat)
    return [_summed(q, flats) for flats in found.values()]


def _summed(question: Question, flats: Sequence[FlatLayout]) -> Alike:
    num_flats = elements = numel = own = own_padding = 0
    for flat in flats:
        count = question.count(flat)
        num_flats += count
        elements += count * flat.padded
        numel += count * flat.numel
        own += count * flat.shard_elements
        own_padding += count * flat.shard_padding(question.shard_index)
    whole = Elements(elements, padding=elements - numel)
    return Alike(flats[0], num_flats, whole, Elements(own, own_padding))


def _parameters(question: Question, groups: Sequence[Alike]) -> Iterator[Held]:
    for group in groups:
        flat = group.flat
        is_sharded = question.is_sharded(flat)
        yield _held(Kind.PARAMETERS, question.home(flat), group, flat.dtype, is_sharded)
        if is_sharded:
            # One scalar, which a flat's parameters show while they are sharded.
            num_bytes = group.num_flats * ITEMSIZE[flat.dtype]
            yield Held(kind=Kind.COUNTERS, num_bytes=num_bytes)


def _states(
    question: Question, groups: Sequence[Alike], *, after_backward: bool, after_step: bool
) -> Iterator[Held]:
    q = question
    for group in groups:
        flat = group.flat
        if not flat.trained:
            continue
        place, dtypes = q.where(flat), q.dtypes(flat)
        memory = Where.DEVICE if place is Where.DEVICE else Where.HOST
        if q.has_copy(flat):
            yield _held(Kind.MASTER, place, group, dtypes.master, q.stage >= 1)
            if not q.is_sharded(flat):
                yield Held(kind=Kind.COUNTERS, num_bytes=group.num_flats * SUM_BYTES)
        if after_backward:
            where = memory if q.stage >= 2 else Where.DEVICE
            yield _held(Kind.GRADIENTS, where, group, dtypes.accumulate, q.stage >= 2)
        if after_step:
            moment = _held(Kind.MOMENTS, place, group, dtypes.master, q.stage >= 1)
            yield from [moment] * q.optimizer.moments
            counters = group.num_flats * q.optimizer.counters * COUNTER_BYTES
            yield Held(kind=Kind.COUNTERS, where=memory, num_bytes=counters)


def _held(kind: Kind, where: Where, group: Alike, dtype: str, sharded: bool) -> Held:
    """Return the bytes of flats, or those of their own shards."""
    size = ITEMSIZE[dtype]
    elements, padding = group.own if sharded else group.whole
    return Held(kind=kind, where=where, num_bytes=elements * size, padding_bytes=padding * size)


def _merged(lines: Iterable[Held]) -> Holdings:
    """Sum lines of the same kind and place."""
    sums: dict[tuple[Kind, Where], list[int]] = {}
    for line in lines:
        total = sums.setdefault((line.kind, line.where), [0, 0])
        total[0] += line.num_bytes
        total[1] += line.padding_bytes
    return Holdings(
        entries=tuple(
            Held(kind=kind, where=where, num_bytes=num_bytes, padding_bytes=padding)
            for (kind, where), (num_bytes, padding) in sums.items()
            if num_bytes
        )
    )


def _scratch(question: Question, flat: FlatLayout) -> int:
    op = "all_reduce" if question.stage == 0 else "reduce_scatter"
    return scratch_elements(question.carrier, op, flat.padded, ranks=question.shards)
