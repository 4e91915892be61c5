"""Dtypes: sums that do not swallow or overflow, mixed modules, and optimizers as torch has them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rayzero.engine import PrecisionOptions, ZeroEngine, ZeroOptions
from rayzero.errors import ConfigError
from rayzero.records import Kind
from tests.engine.harness import (
    Moment,
    Scalar,
    Script,
    Vector,
    assert_trains_like_plain,
    scalar_engine,
)
from tests.ranks import Pools, RankContext

BF16 = torch.bfloat16


def small_after_large(ctx: RankContext, accumulate: str) -> list[float]:
    """Add 1.0, then 256 times 2^-9, in one window."""
    found = []
    for stage in range(4):
        precision = PrecisionOptions(accumulate=accumulate)
        with scalar_engine(ctx, stage, module=Scalar(dtype=BF16), precision=precision) as engine:
            engine.backward(engine(1.0), last=False)
            for index in range(256):
                engine.backward(engine(2.0**-9), last=index == 255)
            mean = engine.full_gradients(all_ranks=True)["w"]
            found.append(round(mean.double().item() * 257, 3))
    return found


def test_small_gradients_are_not_swallowed(ranks: Pools) -> None:
    """E07: 1.5 by default; a user who asks for bf16 sums gets about 1.0 where sums are local."""
    assert ranks(1)(small_after_large, "fp32") == [[1.5] * 4]
    assert ranks(1)(small_after_large, "bf16")[0] == pytest.approx([1.0] * 4, rel=0.01)


def average_in_16_bit(ctx: RankContext, dtype: str, gradient: float) -> list[float]:
    found = []
    for stage in range(4):
        precision = PrecisionOptions(reduce=dtype)
        with scalar_engine(ctx, stage, precision=precision) as engine:
            engine.backward(engine(gradient))
            found.append(engine.full_gradients(all_ranks=True)["w"].item())
            engine.step()
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_averaging_in_16_bit_neither_overflows_nor_underflows(ranks: Pools, dtype: str) -> None:
    """E08: four ranks with 2e4 each, and with 6e-8 each."""
    spacing = {"fp32": 1e-7, "bf16": 2.0**-8, "fp16": 0.01}[dtype]
    for gradient in (2e4, 6e-8):
        for found in ranks(4)(average_in_16_bit, dtype, gradient):
            assert found == pytest.approx([gradient] * 4, rel=spacing)


class Mixed(nn.Module):
    """An fp32 norm, bf16 linears (one frozen), an fp64 scalar, an integer and an fp32 buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.base = nn.Linear(4, 4).to(BF16).requires_grad_(False)
        self.linear = nn.Linear(4, 4).to(BF16)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("table", torch.linspace(0, 1, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        h = (self.norm(x) + self.table).to(BF16)
        return (self.linear(h) + self.base(h)).double().mul(self.scale).square().mean()


def mixed_dtypes(ctx: RankContext) -> list[dict[str, Any]]:
    found = []
    for stage in range(4):
        torch.manual_seed(5)
        module = Mixed()
        zero = ZeroOptions(stage=stage, bucket_elements=5)
        optimizer = partial(torch.optim.SGD, lr=0.1)
        with ZeroEngine(module, optimizer=optimizer, zero=zero, mesh=ctx.mesh()) as engine:
            norms = []
            for step in range(3):
                x = Moment(ctx.rank, step, 0).noise(2, 4).float()
                engine.backward(engine(x))
                norms.append(engine.step().grad_norm)
            state = engine.full_state_dict(all_ranks=True)
            state["table"] = engine.module.table
            dtypes = {t.dtype for t in engine.ledger.transfers if t.op != "broadcast"}
            found.append({"state": state, "norms": norms, "wire": dtypes})
    return found


def plain_mixed(world: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process, in which parameters in bf16 have fp32 copies that the optimizer steps."""
    torch.manual_seed(5)
    module = Mixed()
    trained = [p for p in module.parameters() if p.requires_grad]
    masters = [
        nn.Parameter(p.detach().to(torch.promote_types(p.dtype, torch.float32))) for p in trained
    ]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    norms = []
    for step in range(3):
        sums = [torch.zeros_like(m) for m in masters]
        for rank in range(world):
            module(Moment(rank, step, 0).noise(2, 4).float()).backward()
            for total, parameter in zip(sums, trained, strict=True):
                total.add_(parameter.grad)
                parameter.grad = None
        for master, total in zip(masters, sums, strict=True):
            master.grad = total / world
        norms.append(
            float(torch.stack([m.grad.double().square().sum() for m in masters]).sum().sqrt())
        )
        optimizer.step()
        for parameter, master in zip(trained, masters, strict=True):
            parameter.data.copy_(master.data)
    return module.state_dict(), norms


def test_mixed_dtypes_keep_to_themselves(ranks: Pools) -> None:
    """E57, E59: bit-equal to one process with fp32 masters, in each parameter's own dtype."""
    expected, norms = plain_mixed(2)
    for rank, found in enumerate(ranks(2)(mixed_dtypes)):
        for stage in found:
            for name, value in expected.items():
                mine = stage["state"][name]
                assert mine.dtype == value.dtype, name
                if name != "count":
                    torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6, msg=name)
            assert stage["state"]["count"].item() == 10, f"rank {rank}"
            assert torch.equal(stage["state"]["table"], torch.linspace(0, 1, 4))
            assert stage["norms"] == pytest.approx(norms, rel=1e-5)


def preset_dtypes(ctx: RankContext) -> list[list[torch.dtype]]:
    found = []
    for stage in range(4):
        precision = PrecisionOptions(params="bf16", keep_fp32=("norm.*",))
        optimizer = torch.optim.AdamW
        with ZeroEngine(
            Mixed(),
            optimizer=optimizer,
            precision=precision,
            zero=ZeroOptions(stage=stage),
            mesh=ctx.mesh(),
        ) as engine:
            state = engine.full_state_dict(all_ranks=True)
            names = ("norm.weight", "linear.weight", "scale", "count")
            found.append([*(state[n].dtype for n in names), engine.module.table.dtype])
    return found


def test_a_preset_leaves_buffers_and_what_it_is_told_to_keep(ranks: Pools) -> None:
    """E57, E59."""
    expected = [torch.float32, BF16, torch.float64, torch.int64, torch.float32]
    for found in ranks(2)(preset_dtypes):
        assert found == [expected] * 4


class Normed(nn.Module):
    """A linear with batch norm: running statistics and an integer counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().sum()


def batch_norm_state(ctx: RankContext) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in range(4):
        torch.manual_seed(5)
        zero = ZeroOptions(stage=stage)
        with ZeroEngine(
            Normed(), optimizer=torch.optim.AdamW, zero=zero, mesh=ctx.mesh()
        ) as engine:
            for step in range(3):
                engine.backward(engine(Moment(ctx.rank, step, 0).noise(4, 3).float()))
                engine.step()
            found.append(engine.full_state_dict())
    return found


def test_batch_norm_keeps_its_statistics_by_rank_and_rank_0_gives_its_own(ranks: Pools) -> None:
    """E59."""
    first, second = ranks(2)(batch_norm_state)
    assert second == [{}] * 4
    for state in first:
        assert state["norm.num_batches_tracked"].item() == 3
        assert state["norm.num_batches_tracked"].dtype is torch.int64
        assert torch.equal(state["norm.running_mean"], first[0]["norm.running_mean"])


def one_adam_step(ctx: RankContext) -> list[list[float]]:
    found = []
    for optimizer in (torch.optim.AdamW, torch.optim.Adam):
        for fused in (False, True):
            series = []
            for stage in range(4):
                make = partial(optimizer, lr=0.1, weight_decay=0.5, fused=fused)
                module = Scalar(start=1.0)
                with scalar_engine(ctx, stage, module=module, optimizer=make) as engine:
                    engine.backward(engine(1.0))
                    engine.step()
                    series.append(engine.full_state_dict(all_ranks=True)["w"].item())
            found.append(series)
    return found


def test_adam_and_adamw_are_what_torch_calls_them(ranks: Pools) -> None:
    """E61."""
    for found in ranks(2)(one_adam_step):
        assert found[0] == pytest.approx([0.85] * 4, abs=1e-6)
        assert found[1] == pytest.approx([0.85] * 4, abs=1e-6)
        assert found[2] == pytest.approx([0.90] * 4, abs=1e-6)
        assert found[3] == pytest.approx([0.90] * 4, abs=1e-6)


class Sizes(nn.Module):
    """Tensors of 1, 7 and 1025 elements, and two equal ones."""

    def __init__(self) -> None:
        super().__init__()
        same = torch.randn(9)
        tensors = [torch.randn(1), torch.randn(7), torch.randn(1025), same, same.clone()]
        self.parts = nn.ParameterList(tensors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x).sin().sum() for p in self.parts]).sum()


def sizes_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine(now.noise(1))


ELEMENT_WISE = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_element_wise_optimizers_train_as_on_whole_tensors(ranks: Pools, name: str) -> None:
    """E62, E63."""
    script = Script(make=Sizes, loss=sizes_loss, steps=10, optimizer=ELEMENT_WISE[name])
    options = [ZeroOptions(stage=stage, bucket_elements=500) for stage in range(4)]
    assert_trains_like_plain(ranks, script, options=options)


class Lamb(torch.optim.Optimizer):
    """Scales each tensor's update by its norm."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / p.grad.norm() * p.norm(), alpha=-group["lr"])


REFUSED = {
    "lamb": partial(Lamb, lr=0.1),
    "lamb with a small lr": partial(Lamb, lr=1e-6),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "adafactor with a small lr": partial(torch.optim.Adafactor, lr=1e-6),
    "muon": partial(torch.optim.Muon, lr=0.01),
}


def build_with(ctx: RankContext, name: str) -> str:
    try:
        scalar_engine(ctx, 1, optimizer=REFUSED[name])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_look_beyond_an_element_are_refused(ranks: Pools, name: str) -> None:
    """E63."""
    for text in ranks(2)(build_with, name):
        assert "element-wise" in text
        assert "shard" in text


def bytes_per_parameter(ctx: RankContext, precision: PrecisionOptions) -> list[float]:
    module = Vector(p=64 * 16)
    zero = ZeroOptions(stage=0)
    with ZeroEngine(
        module, optimizer=torch.optim.AdamW, precision=precision, zero=zero, mesh=ctx.mesh()
    ) as engine:
        engine.backward(engine(p=torch.ones(64 * 16)))
        engine.step()
        held = engine.holdings()
        kinds = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.MASTER, Kind.MOMENTS)
        return [held.bytes_of(kind) / (64 * 16) for kind in kinds]


def test_presets_hold_the_bytes_their_names_promise(ranks: Pools) -> None:
    """E07: the dtype that sums are kept in is visible in what is held."""
    bf16 = PrecisionOptions(params="bf16")
    paper = PrecisionOptions(params="bf16", accumulate="bf16")
    assert ranks(1)(bytes_per_parameter, PrecisionOptions()) == [[4, 4, 0, 8]]
    assert ranks(1)(bytes_per_parameter, bf16) == [[2, 4, 4, 8]]
    assert ranks(1)(bytes_per_parameter, paper) == [[2, 2, 4, 8]]
