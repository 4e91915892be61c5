"""Pairwise exchange: results, order of sums, bytes, and the ledger's lines."""

import torch

from rayzero.dist.comm import Communicator
from rayzero.records import Phase
from tests.ranks import Pools, RankContext


def _terms(world: int, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(elements, generator=generator).to(dtype) * 3**r for r in range(world)]


def _collectives(ctx: RankContext, elements: int, dtype: torch.dtype) -> dict[str, object]:
    comm = Communicator(ctx.mesh())
    terms = _terms(ctx.world, elements, dtype)
    size = elements // ctx.world
    own = slice(ctx.rank * size, (ctx.rank + 1) * size)

    scattered = terms[ctx.rank].clone()
    comm.reduce_scatter(scattered, axis="shard", unit="u").wait()
    averaged = terms[ctx.rank].clone()
    comm.reduce_scatter(averaged, axis="shard", unit="u", mean=True).wait()
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
            ("all_gather", Phase.SETUP, part),
            ("all_reduce", Phase.SETUP, 2 * part),
            ("all_reduce", Phase.SETUP, 2 * part),
            ("broadcast", Phase.SETUP, (world - 1) * elements * dtype.itemsize if not rank else 0),
            ("all_gather", Phase.CONTROL, 4 * (world - 1)),
        ]


def test_collectives_sum_in_rank_order_and_send_what_zero_counts(ranks: Pools) -> None:
    for world in (2, 3, 4):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            elements = 96 * world
            _check(world, ranks(world)(_collectives, elements, dtype), elements, dtype)


def _uneven(ctx: RankContext, elements: int) -> tuple[torch.Tensor, int]:
    comm = Communicator(ctx.mesh())
    result = comm.all_reduce(
        _terms(ctx.world, elements, torch.float64)[ctx.rank], axis="shard", unit="u"
    )
    comm.close()
    return result, comm.ledger.sent_bytes


def test_an_all_reduce_takes_any_length(ranks: Pools) -> None:
    for world in (2, 3, 4):
        for elements in (1, 2, 5, 17):
            results = ranks(world)(_uneven, elements)
            terms = _terms(world, elements, torch.float64)
            total = terms[0]
            for term in terms[1:]:
                total = total + term
            assert all(torch.equal(r, total) for r, _ in results)
            assert sum(sent for _, sent in results) == 2 * elements * (world - 1) * 8


def _swapped_order(ctx: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
    comm = Communicator(ctx.mesh())
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


def test_equal_sized_transfers_issued_in_another_order_are_never_mixed(ranks: Pools) -> None:
    for a, b in ranks(2)(_swapped_order):
        assert a.tolist() == [3.0, 3.0]
        assert b.tolist() == [201.0, 201.0]
