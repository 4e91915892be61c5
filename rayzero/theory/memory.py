"""Bytes one rank holds, by kind: ZeRO's table, with padding, buckets and counters named.

With Psi parameters, N shards and K bytes of optimizer state per parameter (12 in mixed precision):
stage 0 holds 2 Psi + 2 Psi + K Psi, stage 1 2 Psi + 2 Psi + K Psi/N, stage 2 2 Psi + (2+K) Psi/N,
stage 3 (4+K) Psi/N (Rajbhandari et al., arXiv:1910.02054, section 5 and figure 1).
"""

from collections.abc import Callable

from rayzero.config.cell import CellConfig
from rayzero.layout.dtypes import ITEMSIZE
from rayzero.layout.spec import FlatLayout
from rayzero.layout.volume import swaps
from rayzero.records import Held, Holdings, Kind
from rayzero.theory.question import COUNTER_BYTES, Question, question_of

DEFAULT_BUCKET_ELEMENTS = 4 * 1024 * 1024
STATES = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.MASTER, Kind.MOMENTS)


def holdings_of(
    question: Question, *, after_backward: bool = True, after_step: bool = True
) -> Holdings:
    """Return what the rank holds between steps: gradients and buckets live from the first backward,
    moments and counters from the first applied step."""
    q = question
    entries = [
        _sum(Kind.PARAMETERS, q, q.layouts, q.is_sharded, lambda f: f.dtype),
        _sum(
            Kind.MASTER,
            q,
            [f for f in q.trained if q.dtypes(f).has_master],
            lambda f: q.stage >= 1,
            lambda f: q.dtypes(f).master,
        ),
        Held(kind=Kind.MODULE_BUFFERS, num_bytes=q.buffers_bytes),
        Held(kind=Kind.COUNTERS, num_bytes=_placeholders(q) + (_counters(q) if after_step else 0)),
    ]
    if after_backward:
        entries.append(
            _sum(
                Kind.GRADIENTS,
                q,
                q.trained,
                lambda f: q.stage >= 2,
                lambda f: q.dtypes(f).accumulate,
            )
        )
        entries.append(Held(kind=Kind.BUCKETS, num_bytes=bucket_bytes(q)))
    if after_step:
        one = _sum(Kind.MOMENTS, q, q.trained, lambda f: q.stage >= 1, lambda f: q.dtypes(f).master)
        entries.append(
            Held(
                kind=Kind.MOMENTS,
                num_bytes=one.num_bytes * q.optimizer.moments,
                padding_bytes=one.padding_bytes * q.optimizer.moments,
            )
        )
    return Holdings(entries=tuple(e for e in entries if e.num_bytes))


def bucket_bytes(question: Question) -> int:
    """Bytes of send buffers and receive scratch: two of each with overlap, one without.

    Stages 2 and 3 send from a buffer as long as the longest flat; stages 0 and 1 only where the
    wire has another dtype than the sum. Pairwise exchange receives the peers' parts into scratch.
    """
    slots = min(2 if question.overlap else 1, len(question.trained))
    buffer: dict[str, int] = {}
    scratch: dict[str, int] = {}
    for flat in question.trained:
        dtypes = question.dtypes(flat)
        name = dtypes.reduce
        if question.stage >= 2 or dtypes.reduce != dtypes.accumulate:
            buffer[name] = max(buffer.get(name, 0), flat.padded)
        scratch[name] = max(scratch.get(name, 0), _scratch(question, flat))
    return slots * sum(n * ITEMSIZE[k] for sizes in (buffer, scratch) for k, n in sizes.items())


def cell_holdings(config: CellConfig, world: int, *, rank: int, pairwise: bool) -> Holdings:
    """Return what a rank of a cell with our transformer holds between steps."""
    bucket = config.zero.bucket_elements or DEFAULT_BUCKET_ELEMENTS
    return holdings_of(
        question_of(config, world=world, rank=rank, bucket_elements=bucket, pairwise=pairwise)
    )


def cell_state_bytes(config: CellConfig, world: int) -> int:
    """Return the bytes of model states on rank 0: the least that a cell needs per rank."""
    return cell_holdings(config, world, rank=0, pairwise=False).bytes_of(*STATES)


def _sum(
    kind: Kind,
    question: Question,
    flats: "tuple[FlatLayout, ...] | list[FlatLayout]",
    sharded: Callable[[FlatLayout], bool],
    dtype: Callable[[FlatLayout], str],
) -> Held:
    """Sum flats, or their own shards where the kind is sharded."""
    total = padding = 0
    for flat in flats:
        size = ITEMSIZE[dtype(flat)]
        if sharded(flat):
            total += flat.shard_elements * size
            padding += flat.shard_padding(question.shard_index) * size
        else:
            total += flat.padded * size
            padding += (flat.padded - flat.numel) * size
    return Held(kind=kind, num_bytes=total, padding_bytes=padding)


def _counters(question: Question) -> int:
    return len(question.trained) * question.optimizer.counters * COUNTER_BYTES


def _placeholders(question: Question) -> int:
    """Stage 3 keeps one scalar per flat, which its parameters show while they are sharded."""
    return sum(ITEMSIZE[flat.dtype] for flat in question.layouts if question.is_sharded(flat))


def _scratch(question: Question, flat: FlatLayout) -> int:
    ranks = question.shards
    if ranks == 1 or not question.pairwise:
        return 0
    if question.stage == 0 and swaps(flat.padded, ranks=ranks):
        return flat.padded
    return flat.padded // ranks * (ranks - 1)
