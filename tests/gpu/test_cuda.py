"""What CUDA alone has: an allocator whose peaks are known, pinned memory, streams."""

import gc
from pathlib import Path
from typing import Any

import torch

from rayzero.engine import OffloadOptions, ZeroOptions
from rayzero.records import Kind, Where
from tests.engine.reference import bit_equal
from tests.gpu.cases import Stack, batch, places, stack_engine, train
from tests.ranks import Pools, RankContext

DEADLINE_S = 300.0
BLOCK_BYTES = 512
"""The allocator rounds each tensor up to a multiple of it."""
WIDTH, LAYERS = 1024, 8
UNIT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def fill_caches(ctx: RankContext, stage: int) -> int:
    """Let the libraries take their workspaces; return what is allocated then."""
    with stack_engine(ctx, ZeroOptions(stage=stage), module=Stack(WIDTH, LAYERS)) as engine:
        train(engine, ctx, width=WIDTH)
    del engine
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def allocated(ctx: RankContext, stage: int) -> dict[str, int]:
    """Return what the allocator and the engine say is held, after 3 and after 15 steps."""
    before = fill_caches(ctx, stage)
    found = {}
    with stack_engine(ctx, ZeroOptions(stage=stage), module=Stack(WIDTH, LAYERS)) as engine:
        for name, times in (("after 3", 1), ("after 15", 4)):
            for _ in range(times):
                train(engine, ctx, width=WIDTH)
            torch.cuda.synchronize()
            found[name] = torch.cuda.memory_allocated() - before
        found["held"] = engine.holdings().bytes_of(where=Where.DEVICE)
        found["tensors"] = len(engine.held_tensors())
    return found


def test_the_allocator_holds_what_holdings_say_and_no_more_with_time(cuda_pools: Pools) -> None:
    for stage in range(4):
        found = cuda_pools(1)(allocated, stage, deadline_s=DEADLINE_S)[0]
        spare = found["after 3"] - found["held"]
        assert 0 <= spare <= BLOCK_BYTES * found["tensors"], f"stage {stage}: {found}"
        assert found["after 15"] == found["after 3"], f"stage {stage} grows"


def forward_peak(ctx: RankContext, zero: ZeroOptions) -> int:
    """Return by how much a forward without gradients rises above what is held."""
    fill_caches(ctx, 3)
    with stack_engine(ctx, zero, module=Stack(WIDTH, LAYERS)) as engine, torch.no_grad():
        for _ in range(2):  # the order of units is known from the first
            x = batch(ctx, 0, width=WIDTH)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            engine(x)
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held


def test_a_forward_of_stage_3_holds_one_unit_and_what_is_gathered_ahead(cuda_pools: Pools) -> None:
    activations = 8 * 4 * 8 * WIDTH
    for ahead in (0, 1, 2):
        zero = ZeroOptions(stage=3, prefetch_elements=ahead * (WIDTH * WIDTH + 4 * WIDTH))
        rise = cuda_pools(1)(forward_peak, zero, deadline_s=DEADLINE_S)[0]
        units = (1 + ahead) * UNIT_BYTES
        assert units <= rise <= units * 1.05 + activations, f"{ahead} ahead: {rise} bytes"


def host_tensors(ctx: RankContext, offload: OffloadOptions) -> list[tuple[str, bool]]:
    """Return the kind of each tensor that copies go to and from, and whether it is pinned."""
    with stack_engine(ctx, ZeroOptions(stage=3), offload) as engine:
        train(engine, ctx)
        copied = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.MASTER, Kind.STAGING)
        return [
            (kind.value, tensor.is_pinned())
            for kind, where, tensor in engine.held_by_kind()
            if where is Where.HOST and kind in copied and tensor.numel()
        ]


def test_host_memory_that_is_copied_to_and_from_is_pinned(
    cuda_pools: Pools, tmp_path: Path
) -> None:
    """E72."""
    for offload in places(tmp_path)[1:]:
        found = cuda_pools(1)(host_tensors, offload, deadline_s=DEADLINE_S)[0]
        assert found, f"{offload} keeps nothing on the host"
        assert all(is_pinned for _, is_pinned in found), f"{offload}: {found}"


def on_a_stream(ctx: RankContext, zero: ZeroOptions, aside: bool) -> Any:
    stream = torch.cuda.Stream() if aside else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream), stack_engine(ctx, zero) as engine:
        train(engine, ctx, lags=True)
        weights = engine.full_state_dict(all_ranks=True)
    torch.cuda.synchronize()
    return weights


def test_a_stream_of_the_users_own_changes_no_bit(cuda_pools: Pools) -> None:
    for stage in range(4):
        zero = ZeroOptions(stage=stage)
        first, other = (
            cuda_pools(1)(on_a_stream, zero, aside, deadline_s=DEADLINE_S)[0]
            for aside in (False, True)
        )
        assert bit_equal(first, other), f"stage {stage}"
