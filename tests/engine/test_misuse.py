"""Wrong use ends in an error that says what to do, never in a step on wrong gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rayzero.engine import ZeroEngine, ZeroOptions
from tests.engine.harness import (
    SGD,
    Scalar,
    error_of,
    scalar_engine,
    weight,
)
from tests.engine.reference import ADAMW, Net, net_batch
from tests.ranks import Pools, RankContext


def plain_backward(engine: ZeroEngine) -> None:
    engine(2.0).backward()


def output_gradient(engine: ZeroEngine) -> None:
    engine(2.0).backward(torch.tensor(1.0))


def accumulated(engine: ZeroEngine) -> None:
    engine.backward(engine(2.0))
    engine(2.0).backward()


def sum_of_two_engines(engine: ZeroEngine) -> None:
    other = ZeroEngine(Scalar(), optimizer=SGD, mesh=engine.comm)
    other.backward(engine(2.0) + other(2.0))


def outside_backward(ctx: RankContext, misuse: Callable[[ZeroEngine], None]) -> list[Any]:
    """Misuse; step must raise; after zero_grad the engine works."""
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage) as engine:
            misuse(engine)
            found.append(error_of(engine.step))
            engine.zero_grad()
            engine.backward(engine(1.0 + 2 * ctx.rank))
            engine.step()
            found.append(weight(engine))
    return found


@pytest.mark.parametrize(
    "misuse", [plain_backward, output_gradient, accumulated, sum_of_two_engines]
)
def test_a_backward_outside_the_engine_never_becomes_a_step(
    ranks: Pools, misuse: Callable[[ZeroEngine], None]
) -> None:
    """E10."""
    for found in ranks(2)(outside_backward, misuse):
        for text in found[0::2]:
            assert text.startswith("EngineError")
            assert "engine.backward" in text
        assert found[1::2] == [[-2.0]] * 4


def no_backward(ctx: RankContext) -> list[str]:
    """Call the verbs that need a gradient in a fresh window, and in one after a step."""
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage) as engine:
            for _ in range(2):
                found.append(error_of(engine.step))
                found.append(error_of(lambda e=engine: e.scale_gradients(0.5)))
                found.append(error_of(lambda e=engine: e.full_gradients()))
                engine.backward(engine(1.0))
                engine.step()
    return found


def test_verbs_that_need_a_gradient_say_that_there_is_none(ranks: Pools) -> None:
    for found in ranks(2)(no_backward):
        for text in found:
            assert text.startswith("EngineError")
            assert "engine.backward" in text


def not_a_scalar(ctx: RankContext) -> str:
    with scalar_engine(ctx, 2) as engine:
        return error_of(lambda: engine.backward(engine(1.0).expand(3)))


def test_a_loss_that_is_no_scalar_is_refused(ranks: Pools) -> None:
    for text in ranks(2)(not_a_scalar):
        assert text.startswith("EngineError")
        assert "(3,)" in text


def optimizer_step(ctx: RankContext) -> list[Any]:
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage) as engine:
            engine.backward(engine(1.0))
            found.append(error_of(engine.optimizer.step))
            engine.step()
            found.append(weight(engine))
    return found


def test_the_optimizers_own_step_raises_and_names_the_engines(ranks: Pools) -> None:
    for found in ranks(2)(optimizer_step):
        for text in found[0::2]:
            assert text.startswith("EngineError")
            assert "engine.step()" in text
        assert found[1::2] == [[-1.0]] * 4


def scheduled(ctx: RankContext) -> list[list[float]]:
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage) as engine:
            scheduler = LambdaLR(engine.optimizer, lr_lambda=lambda step: 0.5**step)
            for _ in range(3):
                engine.backward(engine(1.0))
                engine.step()
                scheduler.step()
            found.append([*weight(engine), scheduler.get_last_lr()[0]])
    return found


def test_learning_rate_schedulers_attach(ranks: Pools) -> None:
    """1 + 1/2 + 1/4; a warning of torch's would be an error here."""
    for found in ranks(2)(scheduled):
        assert found == [[-1.75, 0.125]] * 4


def add_a_parameter(ctx: RankContext) -> list[str]:
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage) as engine:
            engine.module.late = nn.Parameter(torch.zeros(2))
            found.append(error_of(lambda e=engine: (e.backward(e(1.0)), e.step())))
    return found


def replace_a_parameter(ctx: RankContext) -> list[str]:
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage) as engine:
            engine.module.w = nn.Parameter(torch.zeros(1))
            found.append(error_of(lambda e=engine: (e.backward(e(1.0)), e.step())))
    return found


@pytest.mark.parametrize(
    ("change", "name"), [(add_a_parameter, "late"), (replace_a_parameter, "w")]
)
def test_a_parameter_the_engine_does_not_know_raises(
    ranks: Pools, change: Callable[..., Any], name: str
) -> None:
    for found in ranks(2)(change):
        for text in found:
            assert text.startswith("EngineError"), text
            assert f"'{name}'" in text
            assert "new engine" in text


class Lone(nn.Module):
    """One linear as a unit, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


USES: list[Callable[[nn.Linear, torch.Tensor], Any]] = [
    lambda layer, x: x * layer.weight,
    lambda layer, x: x + layer.bias,
    lambda layer, x: layer.weight.sum(),
    lambda layer, x: layer.weight.norm(),
    lambda layer, x: layer.weight.data,
    lambda layer, x: layer.weight.detach(),
    lambda layer, x: layer.bias[0],
    lambda layer, x: layer.bias.tolist(),
    lambda layer, x: layer.bias.item(),
    lambda layer, x: torch.cat([x, layer.bias]),
    lambda layer, x: nn.init.zeros_(layer.weight),
    lambda layer, x: layer.forward(x),
    lambda layer, x: layer.state_dict(),
    lambda layer, x: layer.weight.numpy(force=True),
    lambda layer, x: x.copy_(layer.bias),
    lambda layer, x: layer.double(),
    lambda layer, x: nn.utils.parameters_to_vector(layer.parameters()),
]


def use_sharded(ctx: RankContext) -> list[str]:
    zero = ZeroOptions(stage=3)
    with ZeroEngine(Lone(), optimizer=ADAMW, zero=zero, mesh=ctx.mesh()) as engine:
        x = torch.ones(1)
        found = [error_of(lambda u=use: u(engine.module.layer, x)) for use in USES]
        layer = engine.module.layer
        shapes = [tuple(layer.weight.shape), layer.weight.dtype, layer.weight.device.type]
        found.append(f"{shapes} {layer.weight.numel()} {layer.weight!r}")
        engine.backward(engine(x))
        engine.step()
        return found


def test_any_use_of_a_sharded_parameter_raises(ranks: Pools) -> None:
    """E33, E78: shape, dtype, device and repr are told; the engine works afterwards."""
    for *refused, told in ranks(2)(use_sharded):
        for index, text in enumerate(refused):
            assert text.startswith("ShardedParameterError"), f"use {index}: {text}"
            assert "layer." in text
            assert "engine.gathered" in text
        assert told.startswith("[(1, 1), torch.float32, 'cpu'] 1 <sharded parameter")


def save_on_one_rank(ctx: RankContext) -> str:
    """Ask for state_dict on rank 0 alone; the others go on, and then rank 0 too."""
    zero = ZeroOptions(stage=3)
    with ZeroEngine(Net(), optimizer=ADAMW, zero=zero, mesh=ctx.mesh()) as engine:
        text = "" if ctx.rank else error_of(engine.module.state_dict)
        engine.backward(engine(*net_batch(0, ctx.rank)))
        engine.step()
        return text


def test_a_state_dict_of_shards_names_the_right_call_and_hangs_nobody(ranks: Pools) -> None:
    """E78."""
    text, other = ranks(2)(save_on_one_rank)
    assert text.startswith("ShardedParameterError")
    assert "engine.full_state_dict()" in text
    assert other == ""


def hooks_left(ctx: RankContext) -> list[int]:
    found = []
    for stage in range(4):
        module = Net()
        with ZeroEngine(
            module, optimizer=ADAMW, zero=ZeroOptions(stage=stage), mesh=ctx.mesh()
        ) as engine:
            engine.backward(engine(*net_batch(0, ctx.rank)))
            engine.step()
        found.append(count_hooks(module))
        if stage < 3:
            module(*net_batch(0, ctx.rank)).backward()
            assert all(p.grad is not None for p in module.parameters())
        engine.close()
    return found


def count_hooks(module: nn.Module) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        on_parameters = [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()]
    on_modules = [
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in module.modules()
    ]
    return sum(on_parameters) + sum(on_modules)


def test_close_takes_every_hook_off(ranks: Pools) -> None:
    """Twice is allowed; at stages 0 to 2 the module is an ordinary one again."""
    assert ranks(2)(hooks_left) == [[0] * 4] * 2
