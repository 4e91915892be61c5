"""Ranks that do not do the same: what is allowed, and for the rest an error that names both."""

import torch
from torch import nn

from rayzero.engine import ZeroEngine, ZeroOptions
from tests.engine.harness import (
    WHOLE_UNIT,
    Moment,
    Script,
    assert_trains_like_plain,
    error_of,
    impatient_mesh,
    scalar_engine,
)
from tests.ranks import Pools, RankContext


class Extra(nn.Module):
    """A linear that the caller may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        h = self.first(x).tanh()
        return self.last(self.extra(h) if extra else h).square().mean()


def extra_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine(now.noise(2, 4), now.rank == 0)


def test_a_module_that_one_rank_skips_inside_a_unit_that_all_run(ranks: Pools) -> None:
    """E35."""
    script = Script(make=Extra, loss=extra_loss)
    assert_trains_like_plain(ranks, script, options=WHOLE_UNIT)


def skip_a_unit(ctx: RankContext) -> str:
    zero = ZeroOptions(stage=3, units=["first", "extra", "last"])
    mesh = impatient_mesh(4.0)
    with ZeroEngine(Extra(), optimizer=torch.optim.AdamW, zero=zero, mesh=mesh) as engine:
        return error_of(lambda: engine(torch.ones(1, 4), ctx.rank == 0))


def test_a_unit_that_one_rank_skips_ends_in_an_error_that_names_both_sides(ranks: Pools) -> None:
    """E35: well before the deadline, and by no signal."""
    for text in ranks(2)(skip_a_unit):
        assert text.startswith("CollectiveError")
        assert "rank 0 waits in all_gather of extra#" in text
        assert "rank 1 waits in all_gather of last#" in text


def loops_of_unequal_length(ctx: RankContext) -> str:
    with scalar_engine(ctx, 2, mesh=impatient_mesh(4.0)) as engine:

        def loop() -> None:
            for _ in range(3 + ctx.rank):
                engine.backward(engine(1.0))
                engine.step()

        return error_of(loop)


def test_a_loop_that_ends_earlier_on_one_rank_ends_in_an_error(ranks: Pools) -> None:
    """E36."""
    short, long = ranks(2)(loops_of_unequal_length)
    assert short == ""
    assert long.startswith("CollectiveError")
    assert "rank 0 waits in nothing" in long
