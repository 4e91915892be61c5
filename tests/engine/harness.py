"""Scripts: a module and a loss, trained by one plain process and at every stage, and compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rayzero.engine import ZeroEngine, ZeroOptions
from rayzero.records import Kind
from tests.engine.reference import bit_equal, largest_difference
from tests.ranks import Pools, RankContext

SGD = partial(torch.optim.SGD, lr=1.0)
SMALL_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True)


class Scalar(nn.Module):
    """SCALAR: one weight at 0 whose gradient is the input; each fault shows a number of its own."""

    def __init__(self, *, start: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), start, dtype=dtype))

    def forward(self, x: float) -> torch.Tensor:
        return (self.w * x).sum()


class Vector(nn.Module):
    """Several named parameters whose gradients are the inputs."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))

    def forward(self, **gradients: torch.Tensor) -> torch.Tensor:
        return torch.stack([(getattr(self, k) * g).sum() for k, g in gradients.items()]).sum()


@dataclass(frozen=True)
class Moment:
    """Which micro-batch a loss is asked for."""

    rank: int
    step: int
    micro: int
    device: str = "cpu"

    def noise(self, *shape: int) -> torch.Tensor:
        """Return data that is this moment's alone."""
        seed = 10_000 * self.step + 100 * self.micro + self.rank
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.device)


@dataclass(frozen=True)
class Script:
    """What each rank does: build a module, compute a loss by calling it, step."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Moment], torch.Tensor]
    """Given the engine (or the plain module) and the moment."""
    steps: int = 3
    micros: int = 1
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
    groups: Callable[[Any], list[dict[str, Any]]] | None = None


EVERY_STAGE = tuple(
    ZeroOptions(stage=stage, bucket_elements=20, overlap=overlap)
    for stage, overlap in ((0, True), (1, False), (2, True), (3, False), (3, True))
)
STAGE_3 = (
    ZeroOptions(stage=3),
    ZeroOptions(stage=3, overlap=False),
    ZeroOptions(stage=3, units=[]),
)
WHOLE_UNIT = tuple(ZeroOptions(stage=stage, bucket_elements=7, units=[]) for stage in range(4))
"""Stage 3 with the module as one unit: what ranks may skip must be part of a unit that all use."""


def built(script: Script) -> nn.Module:
    """Build the script's module in fp64, with the same values everywhere."""
    torch.manual_seed(5)
    return script.make().double()


def plain(script: Script, world: int) -> dict[str, torch.Tensor]:
    """Train in this process on the mean over all ranks' losses; missing gradients are zeros."""
    module = built(script)
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    groups = script.groups(trained) if script.groups else [{"params": [p for _, p in trained]}]
    optimizer = script.optimizer(groups)
    for step in range(script.steps):
        for micro in range(script.micros):
            for rank in range(world):
                loss = script.loss(module, Moment(rank, step, micro))
                (loss / (world * script.micros)).backward()
        for _, parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


def at_stages(
    ctx: RankContext, script: Script, options: Sequence[ZeroOptions]
) -> list[dict[str, torch.Tensor]]:
    """Train the script once per option; nothing may be left gathered after backward or step."""
    weights = []
    for zero in options:
        with ZeroEngine(
            built(script),
            optimizer=script.optimizer,
            param_groups=script.groups,
            zero=zero,
            mesh=ctx.mesh(),
        ) as engine:
            for step in range(script.steps):
                for micro in range(script.micros):
                    loss = script.loss(engine, Moment(ctx.rank, step, micro, ctx.device))
                    engine.backward(loss, last=micro == script.micros - 1)
                    assert_nothing_gathered(engine)
                engine.step()
                assert_nothing_gathered(engine)
                assert all(p.grad is None for p in engine.module.parameters())
            weights.append(engine.full_state_dict(all_ranks=True))
    return weights


def assert_trains_like_plain(
    ranks: Pools,
    script: Script,
    *,
    world: int = 2,
    options: Sequence[ZeroOptions] = EVERY_STAGE,
    bound: float = 1e-10,
) -> None:
    """Assert that every option gives REF's weights, the same bits on all ranks."""
    expected = plain(script, world)
    results = ranks(world)(at_stages, script, options)
    for position, zero in enumerate(options):
        mine = results[0][position]
        for other in results:
            assert bit_equal(other[position], mine), f"ranks differ: {zero}"
        assert largest_difference(mine, expected) <= bound, f"differs from one process: {zero}"


def assert_nothing_gathered(engine: ZeroEngine) -> None:
    """Assert that every sharded parameter's whole has been freed."""
    assert engine.holdings().bytes_of(Kind.GATHERED) == 0


def scalar_engine(ctx: RankContext, stage: int, **options: Any) -> ZeroEngine:
    """Build SCALAR under SGD with lr 1."""
    module = options.pop("module", None) or Scalar()
    zero = ZeroOptions(stage=stage, overlap=options.pop("overlap", True))
    optimizer = options.pop("optimizer", SGD)
    mesh = options.pop("mesh", None) or ctx.mesh()
    return ZeroEngine(module, optimizer=optimizer, zero=zero, mesh=mesh, **options)


def weight(engine: ZeroEngine, name: str = "w") -> list[float]:
    """Return a parameter's full values."""
    return engine.full_state_dict(all_ranks=True)[name].double().flatten().tolist()


def error_of(call: Callable[[], Any]) -> str:
    """Return the type and text of what call raises; empty if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def impatient_mesh(seconds: float) -> DeviceMesh:
    """Build a mesh over all ranks whose waits end in an error after this many seconds."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
