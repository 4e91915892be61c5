"""What a gang's ranks can be asked to do: functions of a member, importable on every node."""

from rayzero.cluster.rank import Member
from rayzero.config.cell import CellConfig
from rayzero.records import RankReport
from rayzero.train.cell import run_rank


def train_cell(member: Member, config: CellConfig) -> RankReport:
    """Build, train and measure one cell on one rank."""
    return run_rank(member, config)
