"""Several backwards per step: each one counts once, at every stage, however they are called."""

import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from rayzero.dist.comm import Communicator
from rayzero.engine import OffloadOptions, PrecisionOptions
from tests.engine.delayed import Late
from tests.engine.harness import (
    WHOLE_UNIT,
    Moment,
    Script,
    assert_trains_like_plain,
    error_of,
    impatient_mesh,
    scalar_engine,
    weight,
)
from tests.ranks import Pools, RankContext

SCALAR_RUNS = [(s, o) for s in range(4) for o in (False, True)]


def windows_of_four(
    ctx: RankContext, last_each_time: bool, place: str = "none", is_late: bool = False
) -> dict[str, list[float]]:
    found = {}
    with ThreadPoolExecutor(max_workers=1) as worker:
        late = {"transport": lambda group, device_type: Late(group, worker)} if is_late else {}
        for stage, overlap in SCALAR_RUNS:
            offload = OffloadOptions(optimizer=place, folder=tempfile.gettempdir())
            comm = Communicator(ctx.mesh(), **late)
            with scalar_engine(ctx, stage, overlap=overlap, mesh=comm, offload=offload) as engine:
                series = []
                for _ in range(3):
                    for micro in range(4):
                        loss = engine(1.0 + micro + 4 * ctx.rank)
                        engine.backward(loss, last=last_each_time or micro == 3)
                    series += [engine.step().grad_norm, *weight(engine)]
                found[f"stage {stage} overlap {overlap}"] = series
    return found


@pytest.mark.parametrize("last_each_time", [False, True])
@pytest.mark.parametrize(
    ("place", "is_late"), [("none", False), ("none", True), ("host", False), ("disk", False)]
)
def test_every_micro_batch_reaches_the_step_in_every_window(
    ranks: Pools, last_each_time: bool, place: str, is_late: bool
) -> None:
    """E01, E02 (offload), E06 (late transfers): rank 0 sees 1 2 3 4, rank 1 sees 5 6 7 8."""
    for found in ranks(2)(windows_of_four, last_each_time, place, is_late):
        for run, series in found.items():
            assert series == [4.5, -4.5, 4.5, -9.0, 4.5, -13.5], run


class Heads(nn.Module):
    """A trunk, and two heads of which a micro-batch may use any."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.a = nn.Linear(3, 2)
        self.b = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, heads: str) -> torch.Tensor:
        h = self.trunk(x).tanh()
        return h.square().mean() + sum(getattr(self, k)(h).square().mean() for k in heads)


def heads_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    uses = ["a", "b", "ab", ""][now.micro] if now.step == 0 else ""
    if now.rank:
        uses = uses.translate(str.maketrans("ab", "ba"))
    return engine(now.noise(2, 3), uses)


def test_heads_used_in_some_micro_batches_only(ranks: Pools) -> None:
    """E03: and nothing of the first window's heads leaks into those that use the trunk alone."""
    script = Script(make=Heads, loss=heads_loss, micros=4)
    assert_trains_like_plain(ranks, script, options=WHOLE_UNIT)


def split_eight_samples(ctx: RankContext, stage: int) -> list[list[float]]:
    """Train on 8 samples a rank cut into 1, 2 and 8 micro-batches; and on the first 6 as 3 of 4."""
    samples = torch.arange(8.0) + 10 * ctx.rank
    found = []
    for size, used in ((8, 8), (4, 8), (1, 8), (2, 6)):
        with scalar_engine(ctx, stage) as engine:
            losses = []
            for part in samples[:used].split(size):
                loss = engine(part).div(size) + part.mean()
                losses.append(float(loss.detach()))
                engine.backward(loss)
            report = engine.step()
            found.append([sum(losses) / len(losses), report.grad_norm, *weight(engine)])
    return found


def test_the_engine_divides_by_the_number_of_backwards(ranks: Pools) -> None:
    """E04: equal for every split, and a short window is the mean of what it has."""
    for stage in range(4):
        for rank, found in enumerate(ranks(2)(split_eight_samples, stage)):
            for loss, norm, w in found[:3]:
                assert loss == pytest.approx(3.5 + 10 * rank)
                assert norm == pytest.approx(8.5)
                assert w == pytest.approx(-8.5)
            assert found[3][1:] == pytest.approx([7.5, -7.5])


def constant_input(ctx: RankContext) -> dict[str, list[float]]:
    found = {}
    for stage in range(4):
        for params in ("fp32", "bf16"):
            precision = PrecisionOptions(params=params)
            with scalar_engine(ctx, stage, precision=precision) as engine:
                engine.optimizer.param_groups[0]["lr"] = 0.0
                norms = []
                for _ in range(20):
                    engine.backward(engine(1.0))
                    norms.append(engine.step().grad_norm)
                found[f"stage {stage} {params}"] = norms
    return found


def test_the_norm_of_a_constant_gradient_stays_constant(ranks: Pools) -> None:
    """E09, E12: a gradient that is not cleared, or reduced twice, makes it grow."""
    for found in ranks(2)(constant_input):
        for run, norms in found.items():
            assert norms == [1.0] * 20, run


def weighted_windows(ctx: RankContext) -> list[list[float]]:
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage) as engine:
            # Gradients 1 and 2 with weights 1 and 3 on rank 0; 5 and 7 with weights 0 and 12 on 1.
            for x, w in (((1.0, 1.0), (2.0, 3.0)), ((5.0, 0.0), (7.0, 12.0)))[ctx.rank]:
                engine.backward(engine(x), weight=w)
            gradient = engine.full_gradients(all_ranks=True)["w"].item()
            norm = engine.step().grad_norm
            engine.backward(engine(3.0), weight=0.25)
            engine.step()
            found.append([gradient, norm, *weight(engine)])
    return found


def test_weights_differ_by_call_and_rank(ranks: Pools) -> None:
    """The gradient is sum(w g) / sum(w) = (1 + 6 + 0 + 84) / 16, whatever the ranks' shares are."""
    for found in ranks(2)(weighted_windows):
        assert found == [[5.6875, 5.6875, -8.6875]] * 4


def forwards_before_backwards(engine: nn.Module, now: Moment) -> torch.Tensor:
    first = engine(now.noise(2, 3), "a")
    second = engine(2 * now.noise(2, 3), "b")
    return first + second


def test_two_forwards_in_one_loss(ranks: Pools) -> None:
    assert_trains_like_plain(ranks, Script(make=Heads, loss=forwards_before_backwards))


def two_graphs(ctx: RankContext) -> list[list[float]]:
    """Backward in the order of the forwards, in the other order, and twice through one graph."""
    found = []
    for stage in range(4):
        for order in ((0, 1), (1, 0), "twice"):
            torch.manual_seed(5)
            module = Heads().double()
            with scalar_engine(ctx, stage, module=module) as engine:
                for step in range(2):
                    x = Moment(ctx.rank, step, 0).noise(2, 3)
                    if order == "twice":
                        loss = engine(x, "ab")
                        engine.backward(loss, retain_graph=True)
                        engine.backward(loss)
                    else:
                        losses = [engine(x, "a"), engine(x, "b")]
                        engine.backward(losses[order[0]])
                        engine.backward(losses[order[1]])
                    engine.step()
                state = engine.full_state_dict(all_ranks=True)
                found.append(torch.cat([v.flatten() for v in state.values()]).tolist())
    return found


def test_two_graphs_alive_at_once_and_one_graph_used_twice(ranks: Pools) -> None:
    results = ranks(2)(two_graphs)
    for found in results:
        assert found == results[0]
        for stage in range(1, 4):
            for case in range(3):
                assert found[3 * stage + case] == pytest.approx(found[case], abs=1e-12)
        assert found[0] == pytest.approx(found[1], abs=1e-12)


def abandoned_window(ctx: RankContext) -> list[list[float]]:
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage) as engine:
            engine.backward(engine(100.0), last=False)
            engine.backward(engine(100.0))
            engine.zero_grad()
            engine.backward(engine(3.0))
            found.append([engine.step().num_backwards, *weight(engine)])
    return found


def test_zero_grad_abandons_the_window(ranks: Pools) -> None:
    for found in ranks(2)(abandoned_window):
        assert found == [[1, -3.0]] * 4


def unlike_windows(ctx: RankContext, stage: int) -> str:
    with scalar_engine(ctx, stage, mesh=impatient_mesh(4.0)) as engine:

        def window() -> None:
            for _ in range(1 + ctx.rank):
                engine.backward(engine(1.0), last=False)
            engine.step()

        return error_of(window)


@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_that_accumulate_differently_are_told(ranks: Pools, stage: int) -> None:
    for text in ranks(2)(unlike_windows, stage):
        assert text.startswith("EngineError")
        assert "[1, 2]" in text


def test_ranks_that_reduce_differently_are_told_who_waits_for_what(ranks: Pools) -> None:
    for text in ranks(2)(unlike_windows, 2):
        assert text.startswith("CollectiveError")
        assert "rank 0 waits in all_gather of window" in text
        assert "rank 1 waits in reduce_scatter of bucket#0" in text
