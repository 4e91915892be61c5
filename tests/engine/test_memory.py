"""What a rank holds: the paper's bytes by kind, nothing unnamed, nothing that grows."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rayzero.engine import PrecisionOptions, ZeroEngine, ZeroOptions
from rayzero.records import Holdings, Kind
from tests.engine.harness import assert_nothing_gathered
from tests.engine.reference import ADAMW, Net, net_batch
from tests.ranks import Pools, RankContext

BUCKET = 200
BF16 = PrecisionOptions(params="bf16")


@contextlib.contextmanager
def watched() -> Iterator[Callable[[], dict[int, torch.Tensor]]]:
    """Give a function that finds the storages with bytes that were made inside this block."""
    gc.collect()
    gc.freeze()
    try:
        yield live_storages
    finally:
        gc.unfreeze()


def live_storages() -> dict[int, torch.Tensor]:
    """Find every storage with bytes that a live, unfrozen tensor of this process uses."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    found = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor.untyped_storage().nbytes():
                found[tensor.untyped_storage()._cdata] = tensor
    return found


def net_engine(ctx: RankContext, stage: int, **options: Any) -> ZeroEngine:
    torch.manual_seed(3)
    zero = ZeroOptions(stage=stage, bucket_elements=BUCKET)
    return ZeroEngine(Net(), optimizer=ADAMW, zero=zero, mesh=ctx.mesh(), **options)


def census(ctx: RankContext, precision: PrecisionOptions) -> list[str]:
    """List tensors that are alive after each verb and that nobody names."""
    unnamed = []
    batch = net_batch(0, ctx.rank)
    ctx.mesh()
    for stage in range(4):
        with watched() as live, net_engine(ctx, stage, precision=precision) as engine:

            def look(verb: str, stage: int = stage, engine: ZeroEngine = engine) -> None:
                named = {t.untyped_storage()._cdata for t in engine.held_tensors()}
                for key, tensor in live().items():
                    if key not in named and tensor.dim():
                        unnamed.append(f"{stage} {verb} {tuple(tensor.shape)} {tensor.dtype}")

            look("start")
            engine.backward(engine(*batch), last=False)
            look("backward")
            engine.backward(engine(*batch))
            look("last backward")
            engine.step()
            look("step")
            engine.full_state_dict()
            engine.eval()
            engine(*batch)
            look("evaluation")
    return unnamed


@pytest.mark.parametrize("precision", [PrecisionOptions(), BF16, PrecisionOptions(reduce="bf16")])
def test_no_live_tensor_is_unnamed(ranks: Pools, precision: PrecisionOptions) -> None:
    """E82: everything but scalars (losses, norms) is in what holdings() counts."""
    assert ranks(2)(census, precision) == [[], []]


def states_after_one_step(
    ctx: RankContext, precision: PrecisionOptions
) -> list[tuple[Holdings, int]]:
    found = []
    for stage in range(4):
        with net_engine(ctx, stage, precision=precision) as engine:
            engine.backward(engine(*net_batch(0, ctx.rank)))
            engine.step()
            elements = sum(layout.padded for layout in engine.layouts)
            found.append((engine.holdings(), elements))
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_states_follow_the_papers_formula(ranks: Pools, world: int, name: str) -> None:
    """E82, E84: parameters, gradients and optimizer state are whole or 1/N by stage."""
    sizes = {"fp32": (4, 4, 0, 8), "bf16": (2, 4, 4, 8)}[name]
    kinds = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.MASTER, Kind.MOMENTS)
    first_sharded = {Kind.PARAMETERS: 3, Kind.GRADIENTS: 2, Kind.MASTER: 1, Kind.MOMENTS: 1}
    precision = BF16 if name == "bf16" else PrecisionOptions()
    parameters = sum(p.numel() for p in Net().parameters())
    for found in ranks(world)(states_after_one_step, precision):
        for stage, (held, elements) in enumerate(found):
            for kind, size in zip(kinds, sizes, strict=True):
                share = world if stage >= first_sharded[kind] else 1
                assert held.bytes_of(kind) == size * elements // share, f"stage {stage} {kind}"
            padding = sum(e.padding_bytes for e in held.entries if e.kind is Kind.PARAMETERS)
            assert padding <= (elements - parameters) * sizes[0]
            assert held.bytes_of(Kind.GATHERED) == 0


def gradient_bytes(ctx: RankContext) -> list[list[tuple[int, int]]]:
    found = []
    for stage in range(4):
        with net_engine(ctx, stage) as engine:
            series = []
            for _ in range(2):
                for micro in range(4):
                    loss = engine(*net_batch(micro, ctx.rank))
                    engine.backward(loss, last=micro == 3)
                    held = engine.holdings()
                    loose = sum(
                        p.grad.nbytes for p in engine.module.parameters() if p.grad is not None
                    )
                    series.append(
                        (held.bytes_of(Kind.GRADIENTS) + loose, held.bytes_of(Kind.BUCKETS))
                    )
                engine.step()
            elements = sum(layout.padded for layout in engine.layouts)
            largest = max(layout.padded for layout in engine.layouts)
            found.append([(elements * 4, largest * 4), *series])
    return found


def test_gradients_are_whole_or_sharded_at_each_micro_batch(ranks: Pools) -> None:
    """E83: at stages 2 and 3 a half, and no more than two buckets with their scratch."""
    for found in ranks(2)(gradient_bytes):
        for stage, ((whole, largest), *series) in enumerate(found):
            expected = whole if stage < 2 else whole // 2
            assert max(gradients for gradients, _ in series) == expected, f"stage {stage}"
            assert max(buckets for _, buckets in series) <= 4 * largest


class Deep(nn.Module):
    """Ten equal linears, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def weights_alive(ctx: RankContext, prefetch: int) -> tuple[list[int], int]:
    """Count whole weights' bytes in each forward, and at the loss."""
    units = [f"layers.{i}" for i in range(10)]
    zero = ZeroOptions(stage=3, units=units, prefetch_elements=prefetch)
    engine = ZeroEngine(Deep(), optimizer=ADAMW, zero=zero, mesh=ctx.mesh())
    seen: list[int] = []

    def look(module: nn.Module, args: Any) -> None:
        seen.append(engine.holdings().bytes_of(Kind.GATHERED) // (64 * 64 * 4))

    with engine:
        for layer in engine.module.layers:
            layer.register_forward_pre_hook(look)
            layer.register_full_backward_pre_hook(look)
        for step in range(2):
            torch.manual_seed(step)
            loss = engine(torch.randn(2, 64).requires_grad_())
            at_loss = engine.holdings().bytes_of(Kind.GATHERED)
            engine.backward(loss)
            engine.step()
            assert_nothing_gathered(engine)
    return seen, at_loss


@pytest.mark.parametrize(("prefetch", "most"), [(0, 1), (64 * 64, 2), (2 * 64 * 64, 3)])
def test_few_layers_are_whole_at_once_and_none_at_the_loss(
    ranks: Pools, prefetch: int, most: int
) -> None:
    """E47: one, and those gathered ahead."""
    for seen, at_loss in ranks(2)(weights_alive, prefetch):
        assert len(seen) == 40
        assert max(seen) <= most
        assert at_loss == 0


class Varied(nn.Module):
    """A net with one oversized parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.big = nn.Linear(4, 1000)
        self.last = nn.Linear(1000, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.big(self.first(x)).tanh()).square().mean()


def hundred_steps(ctx: RankContext) -> list[list[tuple[int, int, int]]]:
    """Train 100 steps on batches of changing length, with evaluations between."""
    found = []
    for stage in (2, 3):
        zero = ZeroOptions(stage=stage, bucket_elements=100)
        with (
            watched() as live,
            ZeroEngine(Varied(), optimizer=ADAMW, zero=zero, mesh=ctx.mesh()) as engine,
        ):
            counts = []
            for step in range(1, 101):
                engine.backward(engine(torch.ones(1 + step % 7, 4)))
                engine.step()
                if step % 10 == 0:
                    with torch.no_grad():
                        engine(torch.ones(2, 4))
                if step in (20, 100):
                    alive = live().values()
                    num_bytes = sum(t.untyped_storage().nbytes() for t in alive)
                    counts.append((len(alive), num_bytes, len(engine.ledger.lines)))
            found.append(counts)
    return found


def test_nothing_grows_over_a_hundred_steps(ranks: Pools) -> None:
    """E86."""
    for found in ranks(2)(hundred_steps):
        for at_20, at_100 in found:
            assert at_20 == at_100


def teacher_and_student(ctx: RankContext) -> list[tuple[int, int, int]]:
    torch.manual_seed(3)
    zero = ZeroOptions(stage=3)
    frozen = Net().requires_grad_(False)
    found = []
    with (
        watched() as live,
        ZeroEngine(frozen, optimizer=ADAMW, zero=zero, mesh=ctx.mesh()) as teacher,
        net_engine(ctx, 2) as student,
    ):
        for step in range(30):
            distill(teacher, student, net_batch(step, ctx.rank))
            if step in (4, 29):
                lines = len(teacher.ledger.lines) + len(student.ledger.lines)
                found.append((len(live()), lines, teacher.holdings().bytes_of()))
    return found


def distill(teacher: ZeroEngine, student: ZeroEngine, batch: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        target = teacher(*batch)
    student.backward((student(*batch) - target).square())
    student.step()


def test_a_teacher_beside_a_student_does_not_grow(ranks: Pools) -> None:
    """E39: two engines in one process."""
    for early, late in ranks(2)(teacher_and_student):
        assert early == late


def after_close(ctx: RankContext) -> list[str]:
    """Drop engines and modules; list what of them stays alive."""
    left = []
    for stage in range(4):
        with watched() as live:
            with net_engine(ctx, stage) as engine:
                engine.backward(engine(*net_batch(0, ctx.rank)))
                engine.step()
            del engine
            left += [f"{stage} {tuple(t.shape)} {t.dtype}" for t in live().values()]
    return left


def test_a_closed_engine_frees_what_it_held(ranks: Pools) -> None:
    assert ranks(2)(after_close) == [[], []]
