"""Shared memory instead of gloo changes no bit and no line of the ledger."""

import pytest
from hypothesis import HealthCheck, given, settings

from rayzero.dist.shared import SharedTransports
from rayzero.dist.transport import transport_for
from tests.engine.random_runs import RunRecipe, Story, runs, train_engine
from tests.engine.test_late_transfers import NAMED
from tests.ranks import Pools, RankContext

EXAMPLES = 20


def both_ways(ctx: RankContext, run: RunRecipe) -> tuple[Story, Story]:
    """Train over gloo and over shared memory."""
    shared = train_engine(ctx, run, SharedTransports(timeout_s=20.0, is_required=True))
    return train_engine(ctx, run, transport_for), shared


def assert_nothing_changes(ranks: Pools, run: RunRecipe) -> None:
    """Assert that both stories are the same."""
    for pairwise, shared in ranks(run.world)(both_ways, run):
        shared.assert_same_as(pairwise, run)


@pytest.mark.parametrize("name", NAMED)
def test_shared_memory_changes_no_bit(ranks: Pools, name: str) -> None:
    assert_nothing_changes(ranks, NAMED[name])


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(run=runs())
def test_shared_memory_changes_no_bit_of_random_runs(ranks: Pools, run: RunRecipe) -> None:
    assert_nothing_changes(ranks, run)
