"""Random runs: a model and every option, trained by the engine and by one plain process.

[Note: drawing evenly]
Hypothesis draws a run and then five more that differ from it a little, where some choices stand in
the place of others. So every run takes the same number of choices, whether it uses them or not:
else a relative may want more than there are, and is discarded. And what must come about equally
often is dealt by a hash of the whole draw: else relatives agree in it.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from rayzero.config.precision import PrecisionConfig
from rayzero.config.zero import OffloadConfig, Place
from rayzero.dist.comm import Communicator
from rayzero.dist.transport import Transport, transport_for
from rayzero.engine import OffloadOptions, ZeroEngine, ZeroOptions
from rayzero.records import Held, Kind, Phase, Transfer
from rayzero.theory.memory import holdings_of
from rayzero.theory.question import OptimizerShape, Question
from rayzero.theory.traffic import step_transfers
from tests.engine.random_models import ModelRecipe, Moment, PartRecipe, built, input_at
from tests.ranks import RankContext

STEPS = 3
MOST_PARTS, MOST_CALLS = 4, 6
DRAWN: Counter[str] = Counter()
"""How many runs were started to be drawn: more than come out of it, where draws are discarded."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-4, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
}
SHAPES = {
    "adamw": OptimizerShape(moments=2, counters=1),
    "sgd": OptimizerShape(moments=1, counters=0),
}


@dataclass(frozen=True)
class RunRecipe:
    """One run. weights and lasts have one entry per micro-batch; odd ranks weigh twice as much."""

    model: ModelRecipe = field(default_factory=ModelRecipe)
    world: int = 2
    replicate: int = 1
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    weights: tuple[float, ...] = (1.0,)
    lasts: tuple[bool, ...] = (True,)
    optimizer: str = "adamw"
    num_groups: int = 1
    max_grad_norm: float | None = None
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    looks_on: bool = False
    """Evaluate between backward and step."""

    def weight(self, now: Moment) -> float:
        """Return what a micro-batch's gradient is multiplied with."""
        return self.weights[now.micro] * (1 + now.rank % 2)

    @property
    def num_reductions(self) -> int:
        """How often stages 0 and 1 reduce: after each last=True, and what is left in the step."""
        return sum(self.lasts) + (not self.lasts[-1])


@dataclass
class Story:
    """What one rank tells of a run. The lists have an entry per step."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    transfers: list[list[Transfer]] = field(default_factory=list)
    formula: list[Transfer] = field(default_factory=list)
    held: set[Held] = field(default_factory=set)
    held_formula: set[Held] = field(default_factory=set)
    left_behind: list[str] = field(default_factory=list)
    """What was not idle after a backward or a step."""

    def assert_same_as(self, other: "Story", run: object) -> None:
        """Assert that nothing was left behind, and that no bit and no line of the ledger differ."""
        assert not self.left_behind, self.left_behind
        assert self.transfers == other.transfers
        assert self.norms == other.norms
        for name, value in other.weights.items():
            assert torch.equal(self.weights[name], value), f"{name} has other bits: {run}"


@dataclass(frozen=True)
class Deal:
    """What must come about equally often. See [Note: drawing evenly]."""

    stage: int
    world: int
    replicate: int
    micros: int
    states: str
    params: str

    @classmethod
    def of(cls, drawn: object) -> "Deal":
        """Deal by a hash of what was drawn."""
        dealt = random.Random(repr(drawn))
        stage, world = dealt.choice((0, 0, 1, 1, 2, 2, 3, 3, 3)), dealt.randint(1, 4)
        places = ("none", "none", "host", "disk")
        return cls(
            stage=stage,
            world=world,
            replicate=dealt.choice((1, 2)) if world % 2 == 0 else 1,
            micros=dealt.randint(1, 3),
            states=dealt.choice(places),
            params=dealt.choice(places) if stage == 3 else "none",
        )


def some_of(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw a subset, by one number."""
    chosen = st.integers(0, 2 ** len(names) - 1)
    return chosen.map(lambda bits: tuple(n for i, n in enumerate(names) if bits >> i & 1))


@st.composite
def parts(draw: Any, earlier: tuple[PartRecipe, ...]) -> PartRecipe:
    """Draw a part that may be tied to an earlier one."""
    tied_to = draw(st.sampled_from([None, None, *range(len(earlier))]))
    hidden, dtype = draw(st.integers(0, 9)), draw(st.sampled_from(["fp64", "fp64", "fp32", "bf16"]))
    if tied_to is not None:
        hidden, dtype = earlier[tied_to].hidden, earlier[tied_to].dtype
    extras = ("scalar", "empty", "spare", "gate", "inner")
    return PartRecipe(
        hidden=hidden,
        dtype=dtype,
        frozen=draw(st.sampled_from(["none", "none", "none", "matrices", "all"])),
        tied_to=tied_to,
        extras=draw(some_of(extras)),
        checkpoint=draw(st.sampled_from(["none", "none", "reentrant", "not reentrant"])),
        around=draw(st.booleans()),
        sits_out=draw(st.sampled_from([0, 0, 0, 0b1, 0b000_111_000, 0b101_010_101, 0b111_111_111])),
    )


@st.composite
def models(draw: Any) -> ModelRecipe:
    """Draw a model; half of them call every part once, always, without checkpoint."""
    found: tuple[PartRecipe, ...] = ()
    for _ in range(MOST_PARTS):
        found += (draw(parts(found)),)
    found = found[: draw(st.integers(1, MOST_PARTS))]
    calls = tuple(range(len(found)))
    kind = draw(st.sampled_from(["plain", "plain", "in order", "any order"]))
    called = draw(st.tuples(*[st.integers(0, 11)] * MOST_CALLS))
    num_calls = draw(st.integers(1, MOST_CALLS))
    if kind == "plain":
        found = tuple(_plain(part) for part in found)
    elif kind == "any order":
        calls = tuple(index % len(found) for index in called[:num_calls])
    # Reentrant checkpoints need an input with a gradient, and so do gates: all ranks must run the
    # same units backward.
    wants = draw(st.sampled_from([True, True, False]))
    needs = any(p.checkpoint == "reentrant" or "gate" in p.extras for p in found)
    return ModelRecipe(
        width=draw(st.integers(0, 9)),
        parts=found,
        calls=calls,
        root_dtype=draw(st.sampled_from(["fp64", "fp32"])),
        input_grad=needs or wants,
        by_keyword=draw(st.booleans()),
    )


@st.composite
def options(draw: Any, unit_names: tuple[str, ...]) -> ZeroOptions:
    """Draw the sizes of stages."""
    units = draw(some_of(unit_names))
    return ZeroOptions(
        bucket_elements=draw(st.sampled_from([1, 10, 64, 10**9])),
        overlap=draw(st.booleans()),
        prefetch_elements=draw(st.sampled_from([None, 0, 100, 10**6])),
        persistence_elements=draw(st.sampled_from([0, 0, 5, 20, 10**6])),
        max_live_elements=draw(st.sampled_from([None, None, 200])),
        units=draw(st.sampled_from([None, units])),
    )


@st.composite
def runs(draw: Any) -> RunRecipe:
    """Draw a run."""
    DRAWN["started"] += 1
    model = draw(models())
    zero = draw(options(model.unit_names))
    dealt = Deal.of((draw(st.integers(0, 2**32 - 1)), model, zero))
    return RunRecipe(
        model=model,
        world=dealt.world,
        replicate=dealt.replicate,
        zero=replace(zero, stage=dealt.stage),
        weights=draw(st.sampled_from([(1.0, 1.0, 1.0), (1.0, 0.5, 2.0)]))[: dealt.micros],
        lasts=draw(st.tuples(*[st.booleans()] * 3))[: dealt.micros],
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        num_groups=draw(st.integers(1, 3)),
        max_grad_norm=draw(st.sampled_from([None, 0.05, 1e3])),
        offload=OffloadOptions(
            optimizer=dealt.states,
            params=dealt.params,
            folder=tempfile.gettempdir(),
            fraction=draw(st.sampled_from([1.0, 0.5])),
        ),
        looks_on=draw(st.sampled_from([False, False, True])),
    )


def train_plain(run: RunRecipe) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in this process on every rank's micro-batches; return weights and gradient norms.

    16-bit parameters have fp32 masters, as in the engine.
    """
    module = built(run.model)
    named = list(module.named_parameters())
    copies = {id(p): _master(p) for _, p in named}
    groups = grouped(run.num_groups, [(n, copies[id(p)]) for n, p in named])
    optimizer = OPTIMIZERS[run.optimizer](groups)
    trained = [(p, copies[id(p)]) for _, p in named if p.requires_grad]
    norms = []
    for step in range(STEPS):
        moments = [
            Moment(rank, step, micro)
            for rank in range(run.world)
            for micro in range(len(run.weights))
        ]
        total = sum(run.weight(now) for now in moments)
        for _, master in trained:
            master.grad = torch.zeros_like(master)
        for now in moments:
            (module(input_at(run.model, now), now) * run.weight(now)).backward()
            for parameter, master in trained:
                if parameter.grad is not None:
                    master.grad += parameter.grad / total
                    parameter.grad = None
        norm = torch.stack([m.grad.double().square().sum() for _, m in trained]).sum().sqrt()
        norms.append(float(norm))
        if run.max_grad_norm is not None and norm > run.max_grad_norm:
            for _, master in trained:
                master.grad.mul_(run.max_grad_norm / norm)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in trained:
                parameter.copy_(master)
    return {k: v.detach().clone() for k, v in module.state_dict().items()}, norms


def train_engine(
    ctx: RankContext,
    run: RunRecipe,
    transport: Callable[[Any, str], Transport] = transport_for,
) -> Story:
    """Train on all ranks and look behind the engine after every backward and step."""
    story = Story()
    comm = Communicator(ctx.mesh(replicate=run.replicate), transport=transport)
    with ZeroEngine(
        built(run.model),
        optimizer=OPTIMIZERS[run.optimizer],
        param_groups=partial(grouped, run.num_groups),
        zero=run.zero,
        offload=run.offload,
        mesh=comm,
        max_grad_norm=run.max_grad_norm,
    ) as engine:
        for step in range(STEPS):
            for micro, last in enumerate(run.lasts):
                now = Moment(ctx.rank, step, micro)
                loss = engine(input_at(run.model, now), now=now)
                engine.backward(loss, last=last, weight=run.weight(now))
                after = f"after backward {micro} of step {step}"
                story.left_behind += left_behind(engine, run, after, may_be_late=True)
            if run.looks_on:
                look_on(engine, run, Moment(ctx.rank, step, 0))
            story.norms.append(engine.step().grad_norm)
            story.left_behind += left_behind(engine, run, f"after step {step}", may_be_late=False)
            story.transfers.append([t for t in engine.ledger.transfers if t.phase != Phase.EVAL])
        question = question_of(engine, run)
        story.held = set(engine.holdings().entries)
        story.held_formula = set(holdings_of(question).entries)
        story.formula = list(
            step_transfers(question, backwards=len(run.weights), reductions=run.num_reductions)
        )
        story.weights = engine.full_state_dict(all_ranks=True)
    return story


def look_on(engine: ZeroEngine, run: RunRecipe, now: Moment) -> None:
    """Evaluate without gradient."""
    engine.eval()
    with torch.no_grad():
        engine(input_at(run.model, now), now=now)
    engine.train()


def left_behind(engine: ZeroEngine, run: RunRecipe, when: str, *, may_be_late: bool) -> list[str]:
    """List what is not idle: gathered bytes, unsharded parameters, gradients on parameters."""
    found = []
    parameters = dict(engine.module.named_parameters())
    gathered = engine.holdings().bytes_of(Kind.GATHERED)
    if gathered:
        found.append(f"{gathered} bytes gathered {when}")
    for layout in engine.layouts:
        sharded = run.zero.stage == 3 and not layout.persistent
        for slot in layout.slots:
            parameter = parameters[slot.spec.name]
            if type(parameter).__name__.startswith("Sharded") is not sharded:
                found.append(f"{slot.spec.name} is a {type(parameter).__name__} {when}")
            if parameter.grad is not None and not (may_be_late and run.model.may_come_late):
                found.append(f"{slot.spec.name} has a gradient {when}")
    return found


def question_of(engine: ZeroEngine, run: RunRecipe) -> Question:
    """Ask theory about this rank."""
    return Question(
        stage=run.zero.stage,
        layouts=engine.layouts,
        shard_index=engine.shard_index,
        replicate_index=engine.comm.rank("replicate"),
        replicate=engine.comm.size("replicate"),
        precision=PrecisionConfig(),
        optimizer=SHAPES[run.optimizer],
        offload=OffloadConfig(
            optimizer=Place(run.offload.optimizer),
            params=Place(run.offload.params),
            folder=run.offload.folder,
            fraction=run.offload.fraction,
        ),
        overlap=run.zero.overlap,
        carrier=engine.carrier,
        buffers_bytes=sum(b.numel() * b.itemsize for b in engine.module.buffers()),
        uses=tuple(engine.unit_uses.items()),
    )


def grouped(num_groups: int, named: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """Deal parameters out to groups with settings of their own; three groups leave one empty."""
    pairs = list(named)
    filled = min(num_groups, 2)
    return [
        {
            "params": [p for _, p in pairs[index::filled]] if index < filled else [],
            "lr": 0.01 * (index + 1),
            "weight_decay": 0.1 * index,
        }
        for index in range(num_groups)
    ]


def _plain(part: PartRecipe) -> PartRecipe:
    extras = tuple(e for e in part.extras if e != "gate")
    return replace(part, checkpoint="none", sits_out=0, extras=extras)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    wide = torch.float64 if parameter.dtype is torch.float64 else torch.float32
    return nn.Parameter(
        parameter.detach().to(wide, copy=True), requires_grad=parameter.requires_grad
    )
