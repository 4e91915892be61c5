"""Modules of every shape under stage 3: outputs, inputs, checkpoints, modes, failures."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rayzero.engine import ZeroEngine, ZeroOptions
from tests.engine.harness import (
    ADAMW,
    EVERY_STAGE,
    STAGE_3,
    Moment,
    Script,
    assert_nothing_gathered,
    assert_trains_like_plain,
    built,
    error_of,
)
from tests.engine.reference import largest_difference
from tests.ranks import Pools, RankContext

OPTIONS = [*EVERY_STAGE, *STAGE_3]


class Part(nn.Module):
    """A norm and a linear, whose result a subclass wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrap(args[0] if args else kwargs["x"])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.linear(self.norm(x)).tanh()

    def wrap(self, x: Any) -> Any:
        return self.run(x)


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass
class Record:
    y: torch.Tensor
    note: str = ""
    nothing: None = None


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    inner: Record


class Plain:
    """An object that nobody knows how to look into."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


def as_dict(part: Part, x: torch.Tensor) -> Any:
    return {"y": part.run(x), "n": 3}


def as_record(part: Part, x: torch.Tensor) -> Any:
    return FrozenRecord(Record(part.run(x)))


def as_pair(part: Part, x: torch.Tensor) -> Any:
    return Pair(part.run(x), [None, ("text", x)])


def as_list(part: Part, x: torch.Tensor) -> Any:
    return [[part.run(x)], None]


def as_view(part: Part, x: torch.Tensor) -> Any:
    return part.run(x).transpose(0, 1)[1:].transpose(0, 1)


def as_input(part: Part, x: torch.Tensor) -> Any:
    return {"y": x, "unused": part.run(x)}


def as_inplace_input(part: Part, x: torch.Tensor) -> Any:
    y = part.run(x.clone())
    x += y
    return x


def as_inplace_first(part: Part, x: torch.Tensor) -> Any:
    return part.run(torch.relu_(x))


def as_object(part: Part, x: torch.Tensor) -> Any:
    return Plain(part.run(x))


def as_side_effect(part: Part, x: torch.Tensor) -> Any:
    part.aux = part.run(x)  # as a router keeps its balance loss
    return None


def first_tensor(value: Any, part: nn.Module) -> torch.Tensor:
    """Dig the tensor out again."""
    if isinstance(value, torch.Tensor):
        return value
    if value is None:
        return part.aux
    if isinstance(value, FrozenRecord):
        return value.inner.y
    if isinstance(value, Plain):
        return value.y
    return first_tensor(value["y"] if isinstance(value, dict) else value[0], part)


class Stack(nn.Module):
    """Parts that wrap their outputs, called by position or by keyword."""

    def __init__(self, wrap: Callable[..., Any], keyword: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        for part in self.parts:
            part.wrap = partial(wrap, part)
        self.keyword = keyword

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * 1.0
        for part in self.parts:
            x = first_tensor(part(x=x) if self.keyword else part(x), part)
        return x.square().mean()


def token_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine((now.noise(3, 6).abs() * 3).long() % 5)


WRAPS = [as_dict, as_record, as_pair, as_list, as_view, as_input, as_inplace_input]
WRAPS += [as_inplace_first, as_object, as_side_effect]


@pytest.mark.parametrize("wrap", WRAPS)
def test_outputs_of_every_kind(ranks: Pools, wrap: Callable[..., Any]) -> None:
    """E40."""
    script = Script(make=partial(Stack, wrap), loss=token_loss, micros=2)
    assert_trains_like_plain(ranks, script, options=STAGE_3)


def test_inputs_by_keyword_only(ranks: Pools) -> None:
    script = Script(make=partial(Stack, as_dict, True), loss=token_loss)
    assert_trains_like_plain(ranks, script, options=STAGE_3)


class Lora(nn.Module):
    """A frozen linear and norm with a trained low-rank path, under a checkpoint."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(6).requires_grad_(False)
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "none":
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.kind == "reentrant")

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + (self.base(h) + self.up(self.down(h))).tanh()


class LoraNet(nn.Module):
    """Adapters around frozen blocks; the checkpoint is inside each block or around it."""

    def __init__(self, kind: str, *, around: bool, repeats: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(Lora("none" if around else kind) for _ in range(4))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.around = kind if around else "none"
        self.repeats = repeats

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in list(self.blocks) * self.repeats:
            if self.around == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.around == "reentrant")
        return self.head(x).square().mean()


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("kind", ["none", "reentrant", "not reentrant"])
def test_frozen_parts_under_checkpoints(ranks: Pools, kind: str, around: bool) -> None:
    """E46, E29: with a tied embedding, and each block used twice."""
    for repeats in (1, 2):
        make = partial(LoraNet, kind, around=around, repeats=repeats)
        script = Script(make=make, loss=token_loss, steps=2, micros=2)
        assert_trains_like_plain(ranks, script, options=STAGE_3)


class FirstFrozen(nn.Module):
    """The first block is frozen and its input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4).requires_grad_(False)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.parts[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for part in self.parts:
            x = part(x)
        return x.square().mean()


def test_a_first_block_whose_input_needs_no_gradient(ranks: Pools) -> None:
    """E42: the harness finds nothing gathered after each backward."""
    script = Script(make=FirstFrozen, loss=token_loss, micros=2)
    assert_trains_like_plain(ranks, script, options=OPTIONS)


def without_gradient(ctx: RankContext) -> list[Any]:
    """Run forwards without gradient between all verbs of training, in train and eval mode."""
    script = Script(make=partial(Stack, as_dict), loss=token_loss)
    found = []
    for zero in STAGE_3:
        states = []
        for disturb in (False, True):
            with ZeroEngine(
                built(script), optimizer=torch.optim.AdamW, zero=zero, mesh=ctx.mesh()
            ) as engine:
                for step in range(3):
                    loss = token_loss(engine, Moment(ctx.rank, step, 0))
                    if disturb:
                        look_on(engine, Moment(ctx.rank, step, 1))
                    engine.backward(loss, last=False)
                    if disturb:
                        look_on(engine, Moment(ctx.rank, step, 1))
                    engine.backward(token_loss(engine, Moment(ctx.rank, step, 2)))
                    engine.step()
                states.append(engine.full_state_dict(all_ranks=True))
        found.append(largest_difference(*states))
    return found


def look_on(engine: ZeroEngine, now: Moment) -> None:
    with torch.no_grad():
        token_loss(engine, now)
    engine.eval()
    token_loss(engine, now)
    with torch.no_grad():
        token_loss(engine, now)
    engine.train()
    assert_nothing_gathered(engine)


def test_forwards_without_gradient_between_training_steps_change_nothing(ranks: Pools) -> None:
    """E44: also one with gradient that nobody uses."""
    for found in ranks(2)(without_gradient):
        assert found == [0.0] * len(STAGE_3)


def many_forwards(ctx: RankContext) -> list[int]:
    script = Script(make=partial(Stack, as_dict), loss=token_loss)
    found = []
    for stage in (0, 3):
        engine = ZeroEngine(
            built(script),
            optimizer=torch.optim.AdamW,
            zero=ZeroOptions(stage=stage),
            mesh=ctx.mesh(),
        )
        with engine, torch.no_grad():
            lengths = []
            for _ in range(10):
                token_loss(engine, Moment(ctx.rank, 0, 0))
                lengths.append(len(engine.ledger.lines))
            found.append(lengths[9] - lengths[2])
    return found


def test_the_ledger_does_not_grow_in_evaluation(ranks: Pools) -> None:
    """E44, E39: an engine that only runs forward keeps the lines of one call."""
    for found in ranks(2)(many_forwards):
        assert found == [0, 0]


class Encoder(nn.Module):
    """Blocks behind a method of another name than forward, as generation loops have."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x).square().mean()


def encoded(ctx: RankContext, zero: ZeroOptions) -> tuple[str, list[float]]:
    """Train a step and call the method without gradient; return its error and its result."""
    torch.manual_seed(5)
    found: list[float] = []
    with ZeroEngine(Encoder(), optimizer=ADAMW, zero=zero, mesh=ctx.mesh()) as engine:
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
        with torch.no_grad():
            x = torch.ones(2, 4)
            text = error_of(lambda: found.extend(engine.module.encode(x).flatten().tolist()))
        assert_nothing_gathered(engine)
    return text, found


def test_a_method_of_another_name_than_forward(ranks: Pools) -> None:
    *options, one_unit = OPTIONS
    expected = ranks(2)(encoded, ZeroOptions(stage=0))
    for zero in options:
        assert ranks(2)(encoded, zero) == expected
    for text, _ in ranks(2)(encoded, one_unit):
        assert "name that module's parent in zero.units" in text


class Failing(nn.Module):
    """A part raises in its forward when told to, after others have run."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.fails = False
        self.parts[1].wrap = self.middle

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("bad batch")
        return self.parts[1].run(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()


def failing_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    module = engine.module if isinstance(engine, ZeroEngine) else engine
    x = now.noise(2, 4).requires_grad_()
    module.fails = isinstance(engine, ZeroEngine)
    if module.fails:
        assert "bad batch" in error_of(lambda: engine(x))
    module.fails = False
    return engine(x)


def test_a_forward_that_raised_is_tried_again(ranks: Pools) -> None:
    script = Script(make=Failing, loss=failing_loss, micros=2)
    assert_trains_like_plain(ranks, script, options=OPTIONS)


def raise_in_backward(ctx: RankContext) -> list[Any]:
    found = []
    for zero in OPTIONS:
        module = Failing().double()
        optimizer = torch.optim.AdamW
        with ZeroEngine(module, optimizer=optimizer, zero=zero, mesh=ctx.mesh()) as engine:
            x = Moment(ctx.rank, 0, 0).noise(2, 4).requires_grad_()

            def refuse(grad: torch.Tensor) -> None:
                raise ValueError("bad gradient")

            x.register_hook(refuse)
            loss = engine(x)
            text = error_of(lambda e=engine, y=loss: e.backward(y))
            engine.zero_grad()
            assert_nothing_gathered(engine)
            engine.backward(failing_loss(engine, Moment(ctx.rank, 0, 1)))
            found.append((text, engine.step().num_backwards))
    return found


def test_a_backward_that_raised_leaves_a_usable_engine(ranks: Pools) -> None:
    for found in ranks(2)(raise_in_backward):
        assert found == [("ValueError: bad gradient", 1)] * len(OPTIONS)


def spoil_output(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    y.add_(1)
    return y


def spoil_input(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    y = h * h
    h.add_(1)
    return y


def spoiled(ctx: RankContext, spoil: Callable[..., Any]) -> list[str]:
    found = []
    for stage in range(4):
        module = Stack(lambda part, x: spoil(part.run(x)))
        zero = ZeroOptions(stage=stage)
        with ZeroEngine(module, optimizer=torch.optim.SGD, zero=zero, mesh=ctx.mesh()) as engine:
            loss = engine(torch.ones(1, 2, dtype=torch.long))
            found.append(error_of(lambda e=engine, x=loss: e.backward(x)))
    return found


@pytest.mark.parametrize("spoil", [spoil_output, spoil_input])
def test_what_backward_needs_changed_in_place_raises_at_every_stage(
    ranks: Pools, spoil: Callable[..., Any]
) -> None:
    for found in ranks(2)(spoiled, spoil):
        assert all(text.startswith("RuntimeError") for text in found[:3])
        assert found[3].startswith("EngineError: a tensor of shape (1, 2, 4)")
