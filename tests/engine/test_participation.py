"""Parameters that are unused, frozen, repeated, shared or chosen by data."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rayzero.engine import OffloadOptions, ZeroEngine, ZeroOptions
from rayzero.records import Kind, Transfer
from rayzero.theory.traffic import step_transfers
from tests.engine.harness import (
    EVERY_STAGE,
    STAGE_3,
    WHOLE_UNIT,
    Moment,
    Scalar,
    Script,
    Vector,
    assert_trains_like_plain,
    error_of,
    scalar_engine,
    weight,
)
from tests.gpu.cases import question_of, stack_engine
from tests.ranks import Pools, RankContext


class Spare(nn.Module):
    """A linear that is never called, and one whose output is cut off from the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.never, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        return self.last(h + self.cut(h).detach()).square().mean()


def spare_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine(now.noise(3, 4))


@pytest.mark.parametrize("units", [None, ["first", "cut", "never", "last"]])
def test_parameters_that_never_take_part(ranks: Pools, units: list[str] | None) -> None:
    """E24: at stage 3 also as units of their own."""
    options = [*EVERY_STAGE, ZeroOptions(stage=3, units=units)]
    assert_trains_like_plain(ranks, Script(make=Spare, loss=spare_loss), options=options)


def used_once(ctx: RankContext) -> list[float]:
    found = []
    for stage in range(4):
        adam = partial(torch.optim.Adam, lr=0.1)
        module = Vector(used=1, other=1)
        with scalar_engine(ctx, stage, module=module, optimizer=adam) as engine:
            one = torch.ones(1)
            engine.backward(engine(used=one, other=one))
            engine.step()
            engine.backward(engine(other=one))
            engine.step()
            found += weight(engine, "used")
    return found


def never_used(ctx: RankContext) -> list[float]:
    found = []
    for stage in range(4):
        module = Vector(used=1, other=1)
        nn.init.ones_(module.used)
        adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        with scalar_engine(ctx, stage, module=module, optimizer=adamw) as engine:
            engine.backward(engine(other=torch.ones(1)))
            engine.step()
            found += weight(engine, "used")
    return found


def used_on_one_rank(ctx: RankContext) -> list[float]:
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage, module=Vector(used=1, other=1)) as engine:
            gradients = {"used": torch.tensor([6.0])} if ctx.rank else {}
            engine.backward(engine(other=torch.ones(1), **gradients))
            engine.step()
            found += weight(engine, "used")
    return found


def test_a_missing_gradient_is_zero_at_every_stage(ranks: Pools) -> None:
    """E25: Adam moves on by momentum, AdamW decays, one rank's gradient is averaged with zero."""
    assert ranks(2)(used_once)[0] == pytest.approx([-0.16701] * 4, abs=1e-5)
    assert ranks(2)(never_used)[0] == pytest.approx([0.95] * 4)
    assert ranks(2)(used_on_one_rank)[0] == [-3.0] * 4


class Frozen(nn.Module):
    """Embedding, linear, norm, linear, of which some are frozen."""

    def __init__(self, *frozen: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 6)
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.first(self.embedding(tokens)).tanh()
        return self.last(self.norm(h)).square().mean()


def frozen_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine((now.noise(3, 4).abs() * 3).long() % 7)


FROZEN = [("embedding", "first"), ("first", "norm", "last"), ("norm",), ("last",)]


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parameters_stay_and_the_others_train(ranks: Pools, frozen: tuple[str, ...]) -> None:
    """E26."""
    each = ZeroOptions(stage=3, units=["embedding", "first", "norm", "last"])
    script = Script(make=partial(Frozen, *frozen), loss=frozen_loss)
    assert_trains_like_plain(ranks, script, options=[*EVERY_STAGE, each])


def frozen_bytes(ctx: RankContext) -> list[list[int]]:
    found = []
    for stage in range(4):
        module = Frozen("embedding", "first", "norm")
        optimizer = torch.optim.AdamW
        zero = ZeroOptions(stage=stage)
        with ZeroEngine(module, optimizer=optimizer, zero=zero, mesh=ctx.mesh()) as engine:
            engine.backward(engine(torch.zeros(1, 2, dtype=torch.long)))
            engine.step()
            held = engine.holdings()
            found.append([held.bytes_of(Kind.GRADIENTS), held.bytes_of(Kind.MOMENTS)])
    return found


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state(ranks: Pools) -> None:
    """E26: the one trained linear has 42 elements, 64 with padding."""
    for found in ranks(2)(frozen_bytes):
        assert found == [[256, 512], [256, 256], [128, 256], [128, 256]]


def freeze_later(ctx: RankContext) -> list[str]:
    found = []
    for stage in range(4):
        for change in (False, True):
            module = Frozen("norm")
            optimizer = torch.optim.AdamW
            zero = ZeroOptions(stage=stage)
            with ZeroEngine(module, optimizer=optimizer, zero=zero, mesh=ctx.mesh()) as engine:
                part = module.norm if change else module.last
                part.requires_grad_(change)
                loss = engine(torch.zeros(1, 2, dtype=torch.long))
                found.append(error_of(lambda e=engine, x=loss: (e.backward(x), e.step())))
    return found


def test_freezing_or_unfreezing_after_the_engine_is_built_raises(ranks: Pools) -> None:
    """E26."""
    for found in ranks(2)(freeze_later):
        for text, name in zip(found, ["last", "norm"] * 4, strict=True):
            assert text.startswith("EngineError")
            assert f"'{name}." in text


def groups_with_an_empty_one(named: Any) -> list[dict[str, Any]]:
    parameters = dict(named)
    return [
        {"params": [], "lr": 0.1},
        {"params": [parameters["frozen"]], "lr": 0.01},
        {"params": [parameters["w"]], "lr": 0.001},
    ]


class HalfFrozen(Scalar):
    """SCALAR beside a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def schedule_groups(ctx: RankContext) -> list[Any]:
    found = []
    for stage in range(4):
        engine = scalar_engine(
            ctx, stage, module=HalfFrozen(), param_groups=groups_with_an_empty_one
        )
        with engine:
            factors = [lambda step: 5.0, lambda step: 7.0, lambda step: 1.0 + step]
            scheduler = LambdaLR(engine.optimizer, lr_lambda=factors)
            for _ in range(2):
                engine.backward(engine(1.0))
                engine.step()
                scheduler.step()
            found.append([len(engine.optimizer.param_groups), *weight(engine)])
    return found


def test_empty_groups_keep_their_place(ranks: Pools) -> None:
    """E27, E28: the third group's own lr and lambda move its weight: -.001, then -.002."""
    for found in ranks(2)(schedule_groups):
        assert found == [[3, pytest.approx(-0.003)]] * 4


def inference_only(ctx: RankContext) -> list[str]:
    found = []
    for stage in range(4):
        module = Scalar(start=2.0).requires_grad_(False)
        with scalar_engine(ctx, stage, module=module) as engine:
            found += [str(engine(3.0).item()), error_of(engine.step), str(weight(engine))]
    return found


def test_an_engine_with_nothing_to_train(ranks: Pools) -> None:
    """E27: it runs forward, and says at step that there was no backward."""
    for found in ranks(2)(inference_only):
        assert found[0::3] == ["6.0"] * 4
        assert all(text.startswith("EngineError") for text in found[1::3])
        assert found[2::3] == ["[2.0]"] * 4


class Cube(Scalar):
    """One module that a parent uses twice."""

    def __init__(self) -> None:
        super().__init__(start=3.0)

    def forward(self, x: Any) -> torch.Tensor:
        return self.w * x


class Twice(nn.Module):
    """y = w (w x)."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = Cube()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cube(self.cube(x)).sum()


def used_twice(ctx: RankContext) -> list[list[float]]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for stage in range(4):
            with scalar_engine(ctx, stage, module=Twice().to(dtype)) as engine:
                x = torch.tensor([[1.0, 3.0][ctx.rank]], dtype=dtype)
                engine.backward(engine(x))
                gradient = engine.full_gradients(all_ranks=True)["cube.w"].tolist()
                engine.step()
                found.append([*gradient, *weight(engine, "cube.w")])
    return found


def test_a_module_used_twice_in_one_forward(ranks: Pools) -> None:
    """E29: dy/dw is 6 and 18, the mean 12."""
    for found in ranks(2)(used_twice):
        assert found == [[12.0, -9.0]] * 8


class Unrolled(nn.Module):
    """A recurrent cell run five times, between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.cell = nn.RNNCell(4, 4)
        self.after = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        h = torch.zeros_like(x[:, 0])
        for t in range(5):
            h = self.cell(x[:, t], h)
        return self.after(h).square().mean()


def unrolled_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine(now.noise(2, 5, 4))


def test_a_cell_unrolled_five_times(ranks: Pools) -> None:
    """E29."""
    each = ZeroOptions(stage=3, units=["before", "cell", "after"])
    script = Script(make=Unrolled, loss=unrolled_loss, micros=2)
    assert_trains_like_plain(ranks, script, options=[*EVERY_STAGE, each])


class Borrowed(nn.Module):
    """A parent that uses its children's weights, and hands one to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.child = nn.LayerNorm(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.child(self.embedding(tokens)) * self.child.weight
        return F.linear(h, self.embedding.weight).square().mean()


def test_weights_of_children_used_by_the_parent(ranks: Pools) -> None:
    """E32: at stage 3 where they are one unit."""
    script = Script(make=Borrowed, loss=frozen_loss)
    assert_trains_like_plain(ranks, script, options=WHOLE_UNIT)


def borrow_from_another_unit(ctx: RankContext) -> str:
    zero = ZeroOptions(stage=3, units=["embedding", "child"])
    with ZeroEngine(Borrowed(), optimizer=torch.optim.AdamW, zero=zero, mesh=ctx.mesh()) as engine:
        return error_of(lambda: engine(torch.zeros(1, 2, dtype=torch.long)))


def test_weights_of_another_unit_are_refused_by_name(ranks: Pools) -> None:
    """E32, E33."""
    for text in ranks(2)(borrow_from_another_unit):
        assert text.startswith("ShardedParameterError")
        assert "'child.weight'" in text
        assert "zero.units" in text


class Gated(nn.Module):
    """A block with a gate that only some inputs open, as its parent is told."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, opened: bool) -> torch.Tensor:
        y = self.inner(x).tanh()
        return x + (y * self.gate if opened else y)


class GatedStack(nn.Module):
    """Blocks that are units, each of which uses or skips one of its parameters by data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(5))

    def forward(self, x: torch.Tensor, opened: int) -> torch.Tensor:
        for position, block in enumerate(self.blocks):
            x = block(x, bool(opened >> position & 1))
        return x.square().mean()


def gated_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    """Open other gates on each rank and in each step."""
    opened = [[0b11111, 0b11111], [0b01111, 0b11111], [0b10101, 0b01010]][now.step][now.rank]
    return engine(now.noise(2, 4), opened)


def test_branches_chosen_by_data_inside_units(ranks: Pools) -> None:
    """E03, E25: a rank that skips a parameter must not wait where the others go on."""
    script = Script(make=GatedStack, loss=gated_loss)
    assert_trains_like_plain(ranks, script, options=[*EVERY_STAGE, *STAGE_3])


class Idle(nn.Module):
    """A tied holder that nobody calls, beside one that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.idle.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).square().mean()


class TwoEmbeddings(nn.Module):
    """The shape of T5: an encoder's and a decoder's embedding, the output tied to both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(9, 4), nn.Embedding(9, 4)
        self.block, self.output = nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.decoder.weight = self.output.weight = self.encoder.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.decoder(tokens) + self.block(self.encoder(tokens))).square().mean()


class FrozenStart(nn.Module):
    """A frozen embedding, which no gradient reaches, and a frozen layer that passes one on."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Embedding(9, 4).requires_grad_(False)
        self.middle, self.end = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.end(self.middle(self.start(tokens))).square().mean()


def gathers_of(
    ctx: RankContext, make: Callable[[], nn.Module], inputs: torch.Tensor
) -> tuple[Counter[Transfer], Counter[Transfer]]:
    """Train each child as a unit; return the second step's transfers and the formula's."""
    module = make()
    zero = ZeroOptions(stage=3, units=[name for name, _ in module.named_children()])
    with stack_engine(ctx, zero, module=module) as engine:
        for _ in range(2):
            engine.backward(engine(inputs))
            engine.step()
        question = question_of(engine, zero, OffloadOptions(), "fp32")
        found = Counter(engine.ledger.transfers)
        return found, Counter(step_transfers(question, backwards=1, reductions=1))


@pytest.mark.parametrize("make", [Idle, TwoEmbeddings, FrozenStart])
def test_each_use_of_a_tied_or_frozen_unit_is_gathered_for_as_theory_says(
    ranks: Pools, make: Callable[[], nn.Module]
) -> None:
    tokens = torch.arange(6)
    inputs = torch.ones(2, 8, requires_grad=True) if make is Idle else tokens
    for found, formula in ranks(2)(gathers_of, make, inputs):
        assert found == formula
