"""The norm counts each element once and the same on all ranks; clipping and skipping follow it."""

import math
from dataclasses import dataclass

import pytest
import torch

from rayzero.dist.ledger import Ledger
from rayzero.engine import ZeroEngine, ZeroOptions
from rayzero.errors import NonFiniteGradientError
from rayzero.layout.spec import TpShard
from rayzero.records import Kind
from tests.engine.harness import SGD, Vector, scalar_engine, weight
from tests.ranks import Pools, RankContext


def clip_three_four(ctx: RankContext) -> list[list[float]]:
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage, module=Vector(p=2), max_grad_norm=1.0) as engine:
            engine.backward(engine(p=torch.tensor([3.0, 4.0])))
            report = engine.step()
            found.append([report.grad_norm, report.clip_factor, *weight(engine, "p")])
            engine.backward(engine(p=torch.tensor([0.3, 0.4])))
            report = engine.step()
            found.append([report.grad_norm, report.clip_factor])
    return found


def test_clipping_by_the_global_norm(ranks: Pools) -> None:
    """E66: the report has the norm before clipping and the factor that was applied."""
    for found in ranks(2)(clip_three_four):
        for stage in range(4):
            assert found[2 * stage] == pytest.approx([5.0, 0.2, -0.6, -0.8])
            assert found[2 * stage + 1] == pytest.approx([0.5, 1.0])


def ones_on_twelve(ctx: RankContext) -> list[float]:
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage, module=Vector(a=5, b=7)) as engine:
            engine.backward(engine(a=torch.ones(5), b=torch.ones(7)))
            found.append(engine.step().grad_norm)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_norm_is_the_same_for_every_world_and_stage(ranks: Pools, world: int) -> None:
    """E67."""
    for found in ranks(world)(ones_on_twelve):
        assert found == pytest.approx([math.sqrt(12)] * 4, rel=1e-7)


def rescale(ctx: RankContext) -> list[float]:
    """Halve the gradient by hand; in the second window one gradient came late."""
    found = []
    for stage in range(4):
        with scalar_engine(ctx, stage, module=Vector(p=2, late=1)) as engine:
            for window in range(2):
                # What is used first has its gradient last.
                gradients = {"late": torch.tensor([12.0])} if window else {}
                gradients["p"] = torch.tensor([3.0, 4.0])
                engine.backward(engine(**gradients))
                engine.scale_gradients(0.5)
                found.append(engine.step().grad_norm)
            found += weight(engine, "late")
    return found


def test_gradients_rescaled_by_hand_change_the_reported_norm(ranks: Pools) -> None:
    """E70: all of them, also those that came after their flat had been sent."""
    for found in ranks(2)(rescale):
        assert found == pytest.approx([2.5, 6.5, -6.0] * 4)


def replicated_and_cut(ctx: RankContext) -> list[float]:
    """Replicated gradient (3, 4); a parameter cut over tp with gradients 6 and 8."""
    found = []
    for stage in range(4):
        mesh = ctx.mesh(tp=2)
        index = mesh.get_local_rank("tp")
        with ZeroEngine(
            Vector(cut=1, whole=2),
            optimizer=SGD,
            zero=ZeroOptions(stage=stage),
            mesh=mesh,
            tensor_parallel={"cut": TpShard(dim=0, index=index, count=2)},
            max_grad_norm=1.0,
        ) as engine:
            cut = torch.tensor([[6.0], [8.0]][index])
            engine.backward(engine(whole=torch.tensor([3.0, 4.0]), cut=cut))
            report = engine.step()
            found += [report.grad_norm, report.clip_factor, *weight(engine, "cut")]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_the_norm_counts_replicated_gradients_once_and_cut_ones_on_every_rank(
    ranks: Pools, world: int
) -> None:
    """T01: sqrt(9 + 16 + 36 + 64) on every rank, and the same clip factor."""
    norm = math.sqrt(125)
    for found in ranks(world)(replicated_and_cut):
        assert found == pytest.approx([norm, 1 / norm, -6 / norm, -8 / norm] * 4)


def scalar_under_tp(ctx: RankContext) -> list[float]:
    found = []
    for stage in range(4):
        mesh = ctx.mesh(tp=2)
        with scalar_engine(ctx, stage, mesh=mesh) as engine:
            engine.backward(engine([1.0, 3.0][mesh.get_local_rank("shard")]))
            found += [engine.step().grad_norm, *weight(engine)]
    return found


def test_the_mean_is_over_data_ranks_and_not_over_the_world(ranks: Pools) -> None:
    """T03."""
    for found in ranks(4)(scalar_under_tp):
        assert found == [2.0, -2.0] * 4


def axes_and_moments(ctx: RankContext) -> list[tuple[set[str], int]]:
    found = []
    for stage in range(4):
        with ZeroEngine(
            Vector(p=64),
            optimizer=torch.optim.AdamW,
            zero=ZeroOptions(stage=stage),
            mesh=ctx.mesh(tp=2),
            tensor_parallel={"p": TpShard(dim=0, index=ctx.rank % 2, count=2)},
        ) as engine:
            engine.backward(engine(p=torch.ones(64)))
            engine.step()
            held = engine.holdings().bytes_of(Kind.MOMENTS)
            found.append((large_transfers(engine.ledger), held))
    return found


def large_transfers(ledger: Ledger) -> set[str]:
    """Name the axes of the transfers that carry more than control values."""
    return {t.axis for t in ledger.transfers if t.elements > 16}


def test_zero_shards_over_the_data_axis_alone(ranks: Pools) -> None:
    """T12: of 128 elements a tp rank has 64 and its shard 32; two moments of 4 bytes."""
    for found in ranks(4)(axes_and_moments):
        assert found == [({"shard"}, 512), *[({"shard"}, 256)] * 3]


@dataclass(frozen=True)
class Outcome:
    """How three windows went, and what they left."""

    windows: list[str]
    num_optimizer_steps: float
    moments_finite: bool
    weight: list[float]


def bad_batch_on_one_rank(ctx: RankContext, policy: str) -> list[Outcome]:
    """See NaN on rank 1 in the second of three windows."""
    found = []
    for stage in range(4):
        bad = float("nan") if ctx.rank == 1 else 1.0
        adamw = torch.optim.AdamW
        with scalar_engine(ctx, stage, optimizer=adamw, on_nonfinite=policy) as engine:
            windows = []
            for x in (1.0, bad, 1.0):
                engine.backward(engine(x))
                try:
                    windows.append("applied" if engine.step().applied else "skipped")
                except NonFiniteGradientError:
                    windows.append("raised")
            state = engine.optimizer.state_dict()["state"][0]
            finite = bool(torch.isfinite(state["exp_avg"]).all())
            found.append(Outcome(windows, float(state["step"]), finite, weight(engine)))
    return found


@pytest.mark.parametrize(("policy", "word"), [("skip", "skipped"), ("raise", "raised")])
def test_one_bad_batch_stops_the_step_on_all_ranks(ranks: Pools, policy: str, word: str) -> None:
    """E37: moments and step counters are those of two steps, on all ranks."""
    first, second = ranks(2)(bad_batch_on_one_rank, policy)
    assert first == second
    for outcome in first:
        assert outcome == Outcome(["applied", word, "applied"], 2.0, True, first[0].weight)


def agree_on_the_end(ctx: RankContext) -> int:
    """Run a loop by the clock, as one rank sees it, whose end all ranks agree on."""
    with scalar_engine(ctx, 2) as engine:
        steps = 0
        while True:
            wants_more = torch.tensor([float(steps < 3 + ctx.rank)])
            if not engine.comm.exchange(wants_more, axis="shard", unit="end").min():
                return steps
            engine.backward(engine(1.0))
            engine.step()
            steps += 1


def test_a_loop_can_agree_on_its_end(ranks: Pools) -> None:
    """E36."""
    assert ranks(2)(agree_on_the_end) == [3, 3]
