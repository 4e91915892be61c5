"""fp16: the scale leaves no trace in results; an overflow anywhere skips the step everywhere."""

import torch
from torch import nn

from rayzero.engine import PrecisionOptions, ZeroEngine, ZeroOptions
from rayzero.engine.loss_scale import INITIAL
from tests.engine.reference import Case, bit_equal, train_engine, train_plain
from tests.ranks import Pools, RankContext

FP16 = PrecisionOptions(params="fp16", loss_scale="dynamic")
STATIC = PrecisionOptions(params="fp16", loss_scale=256)


def test_a_static_power_of_two_changes_no_bit_in_fp32(ranks: Pools) -> None:
    for stage in range(4):
        plain = ranks(2)(train_engine, Case(max_grad_norm=0.1), ZeroOptions(stage=stage))
        scaled = ranks(2)(
            train_engine,
            Case(max_grad_norm=0.1),
            ZeroOptions(stage=stage),
            PrecisionOptions(loss_scale=1024.0),
        )
        assert bit_equal(plain[0]["weights"], scaled[0]["weights"])
        assert plain[0]["norms"] == scaled[0]["norms"]


def test_fp16_follows_fp32(ranks: Pools) -> None:
    _, losses, _ = train_plain(2, Case(steps=5))
    first = None
    for stage in range(4):
        results = ranks(2)(train_engine, Case(steps=5), ZeroOptions(stage=stage), STATIC)
        first = first or results[0]["weights"]
        assert bit_equal(results[0]["weights"], first)
        mean = [
            sum(pair) / 2 for pair in zip(results[0]["losses"], results[1]["losses"], strict=True)
        ]
        assert all(abs(a - b) < 5e-3 * b for a, b in zip(mean, losses, strict=True))


class Scalar(nn.Module):
    """loss = (w x).sum(), so that the gradient is x."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def _overflow(ctx: RankContext, stage: int) -> list[object]:
    engine = ZeroEngine(
        Scalar(64),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
        zero=ZeroOptions(stage=stage),
        precision=FP16,
        mesh=ctx.mesh(),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.1 * (step + 1))
    seen: list[object] = []
    for step in range(3):
        x = torch.full((64,), 0.25, dtype=torch.float16)
        if step == 1 and ctx.rank == 1:
            x[0] = torch.inf  # in the shard that rank 0 owns
        loss = engine(x)
        engine.backward(loss)
        before = engine.full_state_dict(all_ranks=True)["w"]
        report = engine.step()
        if report.applied:
            schedule.step()
        after = engine.full_state_dict(all_ranks=True)["w"]
        counts = [int(s["step"]) for s in engine.optimizer.state.values()]
        moved = not torch.equal(before, after)
        seen.append((report.applied, report.loss_scale, moved, counts, schedule.get_last_lr()))
    engine.close()
    return seen


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_touches_nothing(ranks: Pools) -> None:
    """E64."""
    for stage in range(4):
        results = ranks(2)(_overflow, stage)
        assert results[0] == results[1]
        good, bad, after = results[0]
        assert good == (True, INITIAL, True, [1], [0.1 * 0.1 * 2])
        assert bad == (False, INITIAL, False, [1], [0.1 * 0.1 * 2])
        assert after[:4] == (True, INITIAL / 2, True, [2])
