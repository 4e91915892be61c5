"""Pairwise exchange and shared memory: results, order of sums, bytes, and the ledger's lines."""

import time

import pytest
import torch

from rayzero.dist import board
from rayzero.dist.comm import Communicator
from rayzero.dist.shared import SharedTransports
from rayzero.errors import ClusterError, CollectiveError
from rayzero.layout.volume import PIECE_ELEMENTS
from rayzero.records import Carrier, Phase
from tests.ranks import Pools, RankContext


def _terms(world: int, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(elements, generator=generator).to(dtype) * 3**r for r in range(world)]


BOTH = pytest.mark.parametrize("carrier", [Carrier.PAIRWISE, Carrier.SHARED])


def _comm(ctx: RankContext, carrier: Carrier) -> Communicator:
    if carrier is Carrier.PAIRWISE:
        return Communicator(ctx.mesh())
    transports = SharedTransports(timeout_s=10.0, is_required=True)
    return Communicator(ctx.mesh(), transport=transports)


def _collectives(
    ctx: RankContext, carrier: Carrier, elements: int, dtype: torch.dtype
) -> dict[str, object]:
    comm = _comm(ctx, carrier)
    terms = _terms(ctx.world, elements, dtype)
    size = elements // ctx.world
    own = slice(ctx.rank * size, (ctx.rank + 1) * size)

    scattered = terms[ctx.rank].clone()
    comm.reduce_scatter(scattered, axis="shard", unit="u").wait()
    averaged = terms[ctx.rank].clone()
    comm.reduce_scatter(averaged, axis="shard", unit="u", mean=True).wait()
    aside = torch.zeros(size, dtype=dtype)
    comm.reduce_scatter(terms[ctx.rank].clone(), axis="shard", unit="u", out=aside).wait()
    gathered = torch.zeros(elements, dtype=dtype)
    gathered[own] = terms[ctx.rank][own]
    comm.all_gather(gathered, axis="shard", unit="u").wait()
    reduced = comm.all_reduce(terms[ctx.rank].clone(), axis="shard", unit="u")
    largest = comm.all_reduce(terms[ctx.rank].clone(), axis="shard", unit="u", op="max")
    copied = comm.broadcast(terms[ctx.rank].clone(), axis="shard", unit="u")
    rows = comm.exchange(torch.tensor([float(ctx.rank)]), axis="shard", unit="u")
    comm.close()
    return {
        "own": (own.start, own.stop),
        "scattered": scattered[own],
        "averaged": averaged[own],
        "aside": aside,
        "gathered": gathered,
        "reduced": reduced,
        "largest": largest,
        "copied": copied,
        "rows": rows.flatten().tolist(),
        "lines": [(t.op, t.phase, t.sent_bytes) for t in comm.ledger.transfers],
        "sent": comm.ledger.sent_bytes,
    }


def _check(world: int, results: list[dict[str, object]], elements: int, dtype: torch.dtype) -> None:
    terms = _terms(world, elements, dtype)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    for rank, got in enumerate(results):
        start, stop = got["own"]
        own = slice(start, stop)
        assert torch.equal(got["scattered"], total.to(dtype)[own])
        assert torch.equal(got["aside"], total.to(dtype)[own])
        assert torch.equal(got["averaged"], (total / world).to(dtype)[own])
        whole = torch.cat(
            [t[r["own"][0] : r["own"][1]] for t, r in zip(terms, results, strict=True)]
        )
        assert torch.equal(got["gathered"], whole)
        assert torch.equal(got["reduced"], total.to(dtype))
        assert torch.equal(got["largest"], torch.stack(terms).amax(0))
        assert torch.equal(got["copied"], terms[0])
        assert got["rows"] == [float(r) for r in range(world)]
        part = elements // world * (world - 1) * dtype.itemsize
        assert got["lines"] == [
            ("reduce_scatter", Phase.SETUP, part),
            ("reduce_scatter", Phase.SETUP, part),
            ("reduce_scatter", Phase.SETUP, part),
            ("all_gather", Phase.SETUP, part),
            ("all_reduce", Phase.SETUP, 2 * part),
            ("all_reduce", Phase.SETUP, 2 * part),
            ("broadcast", Phase.SETUP, (world - 1) * elements * dtype.itemsize if not rank else 0),
            ("all_gather", Phase.CONTROL, 4 * (world - 1)),
        ]


@BOTH
def test_collectives_sum_in_rank_order_and_send_what_zero_counts(
    ranks: Pools, carrier: Carrier
) -> None:
    for world in (2, 3, 4):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            elements = 96 * world
            _check(world, ranks(world)(_collectives, carrier, elements, dtype), elements, dtype)


def test_shared_memory_sums_in_pieces(ranks: Pools) -> None:
    elements = 3 * (PIECE_ELEMENTS + 100)
    results = ranks(3)(_collectives, Carrier.SHARED, elements, torch.float32)
    _check(3, results, elements, torch.float32)


def _uneven(ctx: RankContext, carrier: Carrier, elements: int) -> tuple[torch.Tensor, int]:
    comm = _comm(ctx, carrier)
    result = comm.all_reduce(
        _terms(ctx.world, elements, torch.float64)[ctx.rank], axis="shard", unit="u"
    )
    comm.close()
    return result, comm.ledger.sent_bytes


@BOTH
def test_an_all_reduce_takes_any_length(ranks: Pools, carrier: Carrier) -> None:
    for world in (2, 3, 4):
        for elements in (1, 2, 5, 17):
            results = ranks(world)(_uneven, carrier, elements)
            terms = _terms(world, elements, torch.float64)
            total = terms[0]
            for term in terms[1:]:
                total = total + term
            assert all(torch.equal(r, total) for r, _ in results)
            assert sum(sent for _, sent in results) == 2 * elements * (world - 1) * 8


def _swapped_order(ctx: RankContext, carrier: Carrier) -> tuple[torch.Tensor, torch.Tensor]:
    comm = _comm(ctx, carrier)
    buffers = {
        name: torch.full((4,), value + ctx.rank) for name, value in (("a", 1.0), ("b", 100.0))
    }
    order = ("a", "b") if ctx.rank == 0 else ("b", "a")
    handles = [comm.reduce_scatter(buffers[n], axis="shard", unit=n) for n in order]
    for handle in handles:
        handle.wait()
    own = slice(ctx.rank * 2, ctx.rank * 2 + 2)
    comm.close()
    return buffers["a"][own], buffers["b"][own]


@BOTH
def test_equal_sized_transfers_issued_in_another_order_are_never_mixed(
    ranks: Pools, carrier: Carrier
) -> None:
    for a, b in ranks(2)(_swapped_order, carrier):
        assert a.tolist() == [3.0, 3.0]
        assert b.tolist() == [201.0, 201.0]


def _waits_in_circles(ctx: RankContext) -> tuple[float, float]:
    """Each rank waits first for a transfer that the other ends only after its own first wait."""
    transports = SharedTransports(timeout_s=10.0, is_required=True)
    comm = Communicator(ctx.mesh(shard=2, tp=ctx.world // 2), transport=transports)
    axes = ("shard", "tp") if ctx.rank % 2 else ("tp", "shard")
    totals = {axis: torch.ones(3) for axis in axes}
    handles = [comm.start_all_reduce(totals[a], axis=a, unit="u") for a in axes]
    for handle in handles:
        handle.wait()
    comm.close()
    return float(totals["shard"][0]), float(totals["tp"][0])


def test_a_rank_that_waits_on_one_axis_serves_the_other(ranks: Pools) -> None:
    assert ranks(4)(_waits_in_circles) == [(2.0, 2.0)] * 4


def _left_alone(ctx: RankContext) -> str:
    comm = _comm(ctx, Carrier.SHARED)
    if ctx.rank == 1:
        comm.close()
        return ""
    with pytest.raises(CollectiveError) as error:
        comm.all_reduce(torch.ones(4), axis="shard", unit="u")
    comm.close()
    return str(error.value)


def test_a_rank_that_is_gone_is_named_at_once(ranks: Pools) -> None:
    started = time.monotonic()
    said, _ = ranks(2)(_left_alone)
    assert "all_reduce of u" in said
    assert "rank [1] is gone" in said
    assert time.monotonic() - started < 8.0


def _cannot_meet(ctx: RankContext) -> tuple[Carrier, str]:
    allowed = board.read_memory
    if ctx.rank == 1:
        board.read_memory = _forbidden
    try:
        transports = SharedTransports(timeout_s=10.0)
        comm = Communicator(ctx.mesh(), transport=transports)
        carrier = comm.carrier("shard")
        comm.close()
        with pytest.raises(ClusterError) as error:
            _comm(ctx, Carrier.SHARED)
    finally:
        board.read_memory = allowed
    return carrier, str(error.value)


def _forbidden(pid: int, address: int, into: int, num_bytes: int) -> None:
    raise RuntimeError("not permitted")


def test_ranks_that_may_not_read_each_other_exchange_pairwise(ranks: Pools) -> None:
    for carrier, said in ranks(2)(_cannot_meet):
        assert carrier is Carrier.PAIRWISE
        assert "cluster.transport=pairwise" in said
