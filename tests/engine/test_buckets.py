"""Buckets of any size, groups of any size: the same weights, and no more transfers than needed."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rayzero.engine import ZeroEngine, ZeroOptions
from rayzero.records import Kind, Phase
from tests.engine.harness import (
    ADAMW,
    SGD,
    Moment,
    Script,
    Vector,
    assert_trains_like_plain,
    built,
)
from tests.engine.reference import bit_equal
from tests.ranks import Pools, RankContext


class Square(nn.Module):
    """Linears of 64 elements, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Unequal(nn.Module):
    """Parameters of 10, 250 and 10 elements; the big one is registered first, last or between."""

    def __init__(self, big: int) -> None:
        super().__init__()
        sizes = [10, 10]
        sizes.insert(big, 250)
        self.parts = nn.ParameterList(torch.randn(n) for n in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x).sin().mean() for p in self.parts]).sum()


def square_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine(now.noise(2, 8))


def unequal_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine(now.noise(1))


@pytest.mark.parametrize("big", [0, 1, 2])
def test_one_parameter_larger_than_the_bucket(ranks: Pools, big: int) -> None:
    """E14."""
    script = Script(make=partial(Unequal, big), loss=unequal_loss)
    options = [ZeroOptions(stage=stage, bucket_elements=100) for stage in range(4)]
    assert_trains_like_plain(ranks, script, options=options)


def test_parameters_as_large_as_the_bucket(ranks: Pools) -> None:
    """E15: exactly, one less and one more."""
    options = [
        ZeroOptions(stage=stage, bucket_elements=bucket)
        for stage in range(3)
        for bucket in (63, 64, 65, 128)
    ]
    assert_trains_like_plain(ranks, Script(make=Square, loss=square_loss), options=options)


def reductions_and_buckets(ctx: RankContext, bucket: int) -> list[dict[str, Any]]:
    found = []
    for stage in range(3):
        module = Vector(**{f"p{i}": 100 for i in range(30)})
        zero = ZeroOptions(stage=stage, bucket_elements=bucket)
        with ZeroEngine(module, optimizer=SGD, zero=zero, mesh=ctx.mesh()) as engine:
            for _ in range(2):
                ones = {name: torch.ones(100) for name, _ in module.named_parameters()}
                engine.backward(engine(**ones))
                engine.step()
            transfers = engine.ledger.transfers
            found.append(
                {
                    "reductions": [t.elements for t in transfers if t.phase is Phase.BACKWARD],
                    "buckets": engine.holdings().bytes_of(Kind.BUCKETS),
                }
            )
    return found


def test_thirty_parameters_of_a_tenth_of_a_bucket_take_three_reductions(ranks: Pools) -> None:
    """E16."""
    for found in ranks(2)(reductions_and_buckets, 1000):
        assert [f["reductions"] for f in found] == [[1024] * 3] * 3


def test_a_bucket_larger_than_the_model_takes_no_more_than_the_model(ranks: Pools) -> None:
    """E18: one reduction's send buffer and scratch."""
    for found in ranks(2)(reductions_and_buckets, 500_000_000):
        for stage in found:
            assert stage["reductions"] == [3008]
            assert stage["buckets"] <= 2 * 3008 * 4


class OutOfOrder(nn.Module):
    """Registered a, b, c; run a, c, b."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.c(self.a(x).tanh()).tanh()).square().mean()


def out_of_order_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine(now.noise(3, 5))


def test_modules_run_in_another_order_than_registered(ranks: Pools) -> None:
    """E23: with a large step, a weight of the step before would show."""
    options = [
        ZeroOptions(stage=stage, bucket_elements=10, overlap=overlap, units=units)
        for stage, units in ((0, None), (1, None), (2, None), (3, ["a", "b", "c"]))
        for overlap in (False, True)
    ]
    script = Script(
        make=OutOfOrder, loss=out_of_order_loss, optimizer=partial(torch.optim.SGD, lr=0.5), steps=4
    )
    assert_trains_like_plain(ranks, script, options=options)


class Tiny(nn.Module):
    """Parameters of 1, 2, 3 and 5 elements, each in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(n) for n in (1, 2, 3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x).sin().sum() for p in self.parts]).sum()


def group_each(named: Any) -> list[dict[str, Any]]:
    return [{"params": [p], "lr": 0.01 * (i + 1)} for i, (_, p) in enumerate(named)]


def test_groups_with_fewer_elements_than_ranks(ranks: Pools) -> None:
    """E52: most shards are nothing but padding, and their ranks still take part."""
    options = [ZeroOptions(stage=stage) for stage in range(4)]
    script = Script(make=Tiny, loss=unequal_loss, groups=group_each)
    assert_trains_like_plain(ranks, script, world=4, options=options)


def alike_groups(named: Any) -> list[dict[str, Any]]:
    parameters = [p for _, p in named]
    return [{"params": parameters[i::3]} for i in range(3)]


def unlike_groups(named: Any) -> list[dict[str, Any]]:
    parameters = [p for _, p in named]
    settings = [(0.1, 0.5), (0.01, 0.0), (0.0, 0.0)]
    return [
        {"params": parameters[i::3], "lr": lr, "weight_decay": decay}
        for i, (lr, decay) in enumerate(settings)
    ]


def split_groups(ctx: RankContext) -> list[list[dict[str, torch.Tensor]]]:
    """Train with one group, and with three equal ones, with a clip that bites."""
    found = []
    for stage in range(4):
        pair = []
        for groups in (None, alike_groups):
            script = Script(make=Square, loss=square_loss, groups=groups)
            with ZeroEngine(
                built(script).float(),
                optimizer=ADAMW,
                param_groups=groups,
                zero=ZeroOptions(stage=stage, bucket_elements=100),
                mesh=ctx.mesh(),
                max_grad_norm=1e-3,
            ) as engine:
                for step in range(3):
                    x = Moment(ctx.rank, step, 0).noise(2, 8).float()
                    engine.backward(engine(x))
                    engine.step()
                pair.append(engine.full_state_dict(all_ranks=True))
        found.append(pair)
    return found


def test_splitting_a_group_changes_no_bit(ranks: Pools) -> None:
    """E58."""
    for one, three in ranks(2)(split_groups)[0]:
        assert bit_equal(one, three)


def test_groups_with_their_own_lr_and_decay(ranks: Pools) -> None:
    """E58: and a group with lr 0 does not move."""
    script = Script(make=Square, loss=square_loss, groups=unlike_groups)
    options = [ZeroOptions(stage=stage, bucket_elements=100) for stage in range(4)]
    assert_trains_like_plain(ranks, script, options=options)
    still = ranks(2)(lr_zero_group)
    assert still == [[True] * 4] * 2


def lr_zero_group(ctx: RankContext) -> list[bool]:
    script = Script(make=Square, loss=square_loss, groups=unlike_groups)
    before = built(script).state_dict()["layers.2.weight"].clone()
    found = []
    for stage in range(4):
        with ZeroEngine(
            built(script),
            optimizer=ADAMW,
            param_groups=unlike_groups,
            zero=ZeroOptions(stage=stage),
            mesh=ctx.mesh(),
        ) as engine:
            engine.backward(square_loss(engine, Moment(ctx.rank, 0, 0)))
            engine.step()
            after = engine.full_state_dict(all_ranks=True)["layers.2.weight"]
            found.append(torch.equal(before, after))
    return found
