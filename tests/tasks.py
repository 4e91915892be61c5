"""Rank tasks for tests of the runner: plain functions, as a cell's own."""

from rayzero.cluster.rank import Member
from rayzero.config.cell import CellConfig
from rayzero.records import Progress, RankReport
from tests.sweep.records import rank_report


def report_at_once(member: Member, config: CellConfig) -> RankReport:
    """Answer without any work."""
    member.progress(Progress(step=1, num_steps=1, loss=1.0, tokens_per_s=1.0))
    return rank_report(member.seat.rank)


def break_at_stage_1(member: Member, config: CellConfig) -> RankReport:
    """Raise on one rank of a cell with stage 1, answer any other cell."""
    if config.zero.stage == 1 and member.seat.rank == 1:
        raise ValueError("a planted fault")
    return rank_report(member.seat.rank)
