"""Offload: the same bits, the states where they were sent, and nothing left behind."""

import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from rayzero.dist.process import return_freed_pages
from rayzero.engine import OffloadOptions, PrecisionOptions, ZeroEngine, ZeroOptions
from rayzero.errors import ConfigError, OffloadError
from rayzero.records import Kind, Where
from tests.engine.reference import (
    ADAMW,
    Case,
    bit_equal,
    make_net,
    net_batch,
    train_engine,
    two_groups,
)
from tests.ranks import Pools, RankContext

CASE = Case(accumulation=2, max_grad_norm=0.1)


def _train(ctx: RankContext, zero: ZeroOptions, offload: OffloadOptions, params: str) -> Any:
    engine = ZeroEngine(
        make_net(),
        optimizer=ADAMW,
        param_groups=two_groups,
        zero=zero,
        precision=PrecisionOptions(params=params),
        offload=offload,
        mesh=ctx.mesh(),
        max_grad_norm=CASE.max_grad_norm,
    )
    norms = []
    for step in range(CASE.steps):
        for micro in range(CASE.accumulation):
            loss = engine(*net_batch(step, micro * ctx.world + ctx.rank))
            engine.backward(loss, last=micro == 1)
        norms.append(engine.step().grad_norm)
    holdings = engine.holdings()
    weights = engine.full_state_dict(all_ranks=True)
    engine.close()
    return weights, norms, holdings


@pytest.mark.parametrize("params", ["fp32", "bf16"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_offloaded_states_give_the_same_bits(
    ranks: Pools, tmp_path: Path, place: str, params: str
) -> None:
    for stage in range(4):
        zero = ZeroOptions(stage=stage, bucket_elements=150)
        plain = ranks(2)(_train, zero, OffloadOptions(), params)[0]
        for fraction in (1.0, 0.5):
            offload = OffloadOptions(optimizer=place, folder=str(tmp_path), fraction=fraction)
            weights, norms, holdings = ranks(2)(_train, zero, offload, params)[0]
            assert bit_equal(weights, plain[0]), f"stage {stage} fraction {fraction}"
            assert norms == plain[1]
            where = Where.HOST if place == "host" else Where.DISK
            moved = holdings.bytes_of(Kind.MOMENTS, where=where)
            total = holdings.bytes_of(Kind.MOMENTS)
            assert total == plain[2].bytes_of(Kind.MOMENTS)
            assert moved == total if fraction == 1.0 else 0 < moved <= total // 2
    assert not list(tmp_path.iterdir()), "files were left behind"


def test_parameters_on_the_host_give_the_same_bits(ranks: Pools) -> None:
    zero = ZeroOptions(stage=3, persistence_elements=6)
    plain = ranks(3)(train_engine, CASE, zero)[0]["weights"]
    for optimizer in ("none", "host"):
        offload = OffloadOptions(optimizer=optimizer, params="host")
        weights, _, holdings = ranks(3)(_train, zero, offload, "fp32")[0]
        assert bit_equal(weights, plain)
        assert holdings.bytes_of(Kind.PARAMETERS, where=Where.HOST) > 0
        # Where both live on the host the optimizer updates the shards themselves.
        has_copy = holdings.bytes_of(Kind.MASTER) > 0
        assert has_copy


def test_parameters_are_offloaded_at_stage_3_only(ranks: Pools) -> None:
    with pytest.raises(AssertionError, match=r"needs zero\.stage=3, found 2"):
        ranks(2)(_train, ZeroOptions(stage=2), OffloadOptions(params="host"), "fp32")


def test_disk_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"offload\.folder"):
        OffloadOptions(optimizer="disk")


def _unwritable(ctx: RankContext, folder: str) -> str:
    try:
        _train(ctx, ZeroOptions(stage=1), OffloadOptions(optimizer="disk", folder=folder), "fp32")
    except OffloadError as error:
        return str(error)
    return ""


def test_a_full_disk_is_an_error_before_training(ranks: Pools, tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        for message in ranks(2)(_unwritable, str(tmp_path)):
            assert "has no room" in message
            assert "offload.fraction" in message
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


class Wide(nn.Module):
    """Layers of 2 MiB, so that states are large beside the interpreter's noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(704, 704, bias=False) for _ in range(96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _peak_rss(ctx: RankContext, offload: OffloadOptions) -> tuple[int, int]:
    return_freed_pages(above_bytes=2**18)
    Path("/proc/self/clear_refs").write_text("5")
    with torch.device("meta"):
        module = Wide()
    before = psutil.Process(os.getpid()).memory_info().rss
    engine = ZeroEngine(
        module,
        optimizer=ADAMW,
        zero=ZeroOptions(stage=2, bucket_elements=2**19, overlap=False),
        precision=PrecisionOptions(params="bf16", reduce="bf16", accumulate="bf16"),
        offload=offload,
        mesh=ctx.mesh(),
    )
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 704, dtype=torch.bfloat16)))
        engine.step()
    on_disk = engine.holdings().bytes_of(where=Where.DISK)
    engine.close()
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) * 1024 - before, on_disk


@pytest.mark.slow
def test_peak_memory_falls_by_what_is_on_disk(ranks: Pools, tmp_path: Path) -> None:
    pool = ranks(1)
    pool.close()
    (plain, _) = pool(_peak_rss, OffloadOptions())[0]
    pool.close()
    offload = OffloadOptions(optimizer="disk", folder=str(tmp_path))
    (with_disk, on_disk) = pool(_peak_rss, offload)[0]
    pool.close()
    assert on_disk == 96 * 704**2 * 4 * 3
    assert plain - with_disk >= 0.9 * on_disk
