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
from rayzero.engine.shelf import Shelf
from rayzero.engine.state.export import read_export
from rayzero.errors import ConfigError
from rayzero.records import Kind, Where
from tests.engine.harness import error_of
from tests.engine.reference import (
    ADAMW,
    Case,
    Net,
    bit_equal,
    make_net,
    net_batch,
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


@pytest.mark.parametrize(
    ("place", "params"), [("host", "fp32"), ("disk", "fp32"), ("disk", "bf16")]
)
def test_parameters_away_give_the_same_bits(
    ranks: Pools, tmp_path: Path, place: str, params: str
) -> None:
    zero = ZeroOptions(stage=3, persistence_elements=6)
    plain, norms, at_home = ranks(2)(_train, zero, OffloadOptions(), params)[0]
    for optimizer, fraction in (("none", 1.0), ("host", 1.0), ("disk", 1.0), (place, 0.5)):
        offload = OffloadOptions(
            optimizer=optimizer, params=place, folder=str(tmp_path), fraction=fraction
        )
        weights, found, holdings = ranks(2)(_train, zero, offload, params)[0]
        assert bit_equal(weights, plain)
        assert found == norms
        moved = holdings.bytes_of(Kind.PARAMETERS, where=Where(place))
        small = holdings.bytes_of(Kind.PARAMETERS, where=Where.DEVICE)
        assert moved + small == at_home.bytes_of(Kind.PARAMETERS)
        assert moved > small > 0, "the small ones alone stay"
    assert not list(tmp_path.iterdir()), "files were left behind"


def test_what_is_updated_where_it_lives_needs_no_master(ranks: Pools, tmp_path: Path) -> None:
    for place in ("host", "disk"):
        offload = OffloadOptions(optimizer=place, params=place, folder=str(tmp_path))
        _, _, holdings = ranks(2)(_train, ZeroOptions(stage=3), offload, "fp32")[0]
        assert holdings.bytes_of(Kind.MASTER) == 0
        assert holdings.bytes_of(Kind.PARAMETERS, where=Where(place)) > 0


class NotedShelf(Shelf):
    """A shelf that tells when a read is asked for."""

    events: list[str]

    def read(self, name: str, into: torch.Tensor) -> Any:
        self.events.append(f"read {name.partition('.')[0]}")
        return super().read(name, into)


def _events_of_a_forward(ctx: RankContext, folder: str, overlap: bool) -> list[str]:
    """Tell when blocks are read and when they run, by number, in a later forward than the first."""
    net, events = Net(blocks=5), []
    for place, block in enumerate(net.blocks):
        block.register_forward_pre_hook(lambda *_, n=place: events.append(f"run {n}"))
    with ZeroEngine(
        net,
        optimizer=ADAMW,
        zero=ZeroOptions(stage=3, overlap=overlap, units=[f"blocks.{i}" for i in range(5)]),
        offload=OffloadOptions(params="disk", folder=folder),
        mesh=ctx.mesh(),
    ) as engine:
        reads = {f"read {f.index}": f"read {f.unit[7:] or 'root'}" for f in engine.layouts}
        shelf: Any = engine._parts.shelf
        shelf.__class__, shelf.events = NotedShelf, events
        for step in range(2):
            events.clear()
            loss = engine(*net_batch(step, ctx.rank))
            found = [reads.get(event, event) for event in events]
            engine.backward(loss)
            engine.step()
    return [event for event in found if event != "read root"]


def test_a_unit_on_disk_is_read_while_those_before_it_run(ranks: Pools, tmp_path: Path) -> None:
    for overlap in (True, False):
        for events in ranks(2)(_events_of_a_forward, str(tmp_path), overlap):
            assert sorted(events) == sorted(f"{x} {i}" for x in ("read", "run") for i in range(5))
            ahead = [events.index(f"read {i + 2}") < events.index(f"run {i}") for i in range(3)]
            assert ahead == [overlap] * 3


ON_DISK = ZeroOptions(stage=3, units=["blocks.1", "head"])


def _written_into(ctx: RankContext, params: str, folder: str) -> list[Any]:
    """Write frozen and trained weights, read them all, train on, and export."""
    net = make_net()
    net.blocks[0].requires_grad_(False)  # type: ignore[index, operator, union-attr]
    offload = OffloadOptions(optimizer=params, params=params, folder=folder)
    engine = ZeroEngine(net, optimizer=ADAMW, zero=ON_DISK, offload=offload, mesh=ctx.mesh())
    seen = []
    with engine:
        for step in range(2):
            with engine.gathered(engine.module, writer_rank=1), torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.mul_(1.25 + ctx.rank)
            with engine.gathered(engine.module), torch.no_grad():
                seen.append(float(sum(p.double().sum() for p in engine.module.parameters())))
                net.norm.weight.zero_()  # type: ignore[operator, union-attr]
            engine.backward(engine(*net_batch(step, ctx.rank)))
            engine.step()
            seen.append(engine.full_state_dict(all_ranks=True))
        engine.export(Path(folder) / "export")
        seen.append(read_export(Path(folder) / "export"))
    return seen


def test_weights_on_disk_are_written_read_and_exported_like_others(
    ranks: Pools, tmp_path: Path
) -> None:
    plain = ranks(2)(_written_into, "none", str(tmp_path / "a"))[0]
    on_disk = ranks(2)(_written_into, "disk", str(tmp_path / "b"))[0]
    for one, other in zip(plain, on_disk, strict=True):
        assert one == other if isinstance(one, float) else bit_equal(one, other)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["export"]


def _used_after_close(ctx: RankContext, folder: str) -> str:
    offload = OffloadOptions(params="disk", folder=folder)
    with ZeroEngine(
        make_net(), optimizer=ADAMW, zero=ON_DISK, offload=offload, mesh=ctx.mesh()
    ) as engine:
        pass
    return error_of(engine.full_state_dict)


def test_weights_whose_files_are_gone_are_not_made_up(ranks: Pools, tmp_path: Path) -> None:
    for message in ranks(2)(_used_after_close, str(tmp_path)):
        assert message.startswith("OffloadError")
        assert "closed" in message


def _refused(ctx: RankContext, folder: str, breaks: str) -> tuple[str, bool, int]:
    """Fail to build an engine; return the error, whether the module is whole, its hooks."""
    net = make_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def factory(groups: Any) -> torch.optim.Optimizer:
        if breaks == "optimizer":
            raise RuntimeError("no optimizer today")
        return ADAMW(groups)

    def build() -> None:
        ZeroEngine(
            net,
            optimizer=factory,
            zero=ZeroOptions(stage=3),
            offload=OffloadOptions(optimizer="disk", params="disk", folder=folder),
            mesh=ctx.mesh(),
        )

    error = error_of(build)
    loss = net(*net_batch(0, 0))
    loss.backward()
    hooks = sum(len(m._forward_pre_hooks) for m in net.modules())
    return error, bit_equal(before, dict(net.state_dict())), hooks


def test_a_module_is_as_it_was_where_an_engine_could_not_be_built(
    ranks: Pools, tmp_path: Path
) -> None:
    for error, is_whole, hooks in ranks(2)(_refused, str(tmp_path), "optimizer"):
        assert "no optimizer today" in error
        assert is_whole
        assert hooks == 0
    assert not list(tmp_path.iterdir()), "files were left behind"


def test_states_on_the_host_leave_the_device_and_need_no_pinning_without_cuda(
    ranks: Pools,
) -> None:
    """E72: device bytes fall by 12 per parameter and rank, and the host holds just those."""
    for stage in (1, 2, 3):
        zero = ZeroOptions(stage=stage)
        here = ranks(2)(_train, zero, OffloadOptions(), "bf16")[0][2]
        away = ranks(2)(_train, zero, OffloadOptions(optimizer="host"), "bf16")[0][2]
        kinds = (Kind.MASTER, Kind.MOMENTS)
        moved = away.bytes_of(*kinds, where=Where.HOST)
        shard = here.bytes_of(Kind.MASTER) // 4
        assert moved == 12 * shard
        kept = [h.bytes_of(*kinds, where=Where.DEVICE) for h in (here, away)]
        assert kept == [12 * shard, 0]


def test_parameters_are_offloaded_at_stage_3_only(ranks: Pools) -> None:
    with pytest.raises(AssertionError, match=r"needs zero\.stage=3, found 2"):
        ranks(2)(_train, ZeroOptions(stage=2), OffloadOptions(params="host"), "fp32")


def test_disk_needs_a_folder() -> None:
    for kind in ("optimizer", "params"):
        with pytest.raises(ConfigError, match=r"offload\.folder"):
            OffloadOptions(**{kind: "disk"})


def test_a_full_disk_is_an_error_before_training_and_loses_nothing(
    ranks: Pools, tmp_path: Path
) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        for message, is_whole, hooks in ranks(2)(_refused, str(tmp_path), "nothing else"):
            assert message.startswith("OffloadError")
            assert "has no room" in message
            assert "offload.fraction" in message
            assert is_whole
            assert hooks == 0
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


class Wide(nn.Module):
    """Layers of 2 MiB, so that states are large beside the interpreter's noise."""

    def __init__(self, num_layers: int = 96) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(704, 704, bias=False) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _peak_rss(ctx: RankContext, stage: int, offload: OffloadOptions) -> tuple[int, int]:
    return_freed_pages(above_bytes=2**18)
    Path("/proc/self/clear_refs").write_text("5")
    with torch.device("meta"):
        module = Wide()
    before = psutil.Process(os.getpid()).memory_info().rss
    engine = ZeroEngine(
        module,
        optimizer=ADAMW,
        zero=ZeroOptions(stage=stage, bucket_elements=2**19, overlap=False),
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
@pytest.mark.parametrize(
    ("stage", "optimizer", "params", "per_parameter"),
    [(2, "disk", "none", 12), (3, "none", "disk", 2)],
)
def test_peak_memory_falls_by_what_is_on_disk(
    ranks: Pools, tmp_path: Path, stage: int, optimizer: str, params: str, per_parameter: int
) -> None:
    pool = ranks(1)
    pool.close()
    (plain, _) = pool(_peak_rss, stage, OffloadOptions())[0]
    pool.close()
    offload = OffloadOptions(optimizer=optimizer, params=params, folder=str(tmp_path))
    (with_disk, on_disk) = pool(_peak_rss, stage, offload)[0]
    pool.close()
    assert on_disk == 96 * 704**2 * per_parameter
    assert plain - with_disk >= 0.9 * on_disk
