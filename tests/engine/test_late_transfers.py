"""Transfers that come 1-3 ms late change no bit: nothing is read, reused or freed too early."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from rayzero.dist.transport import transport_for
from rayzero.engine import ZeroOptions
from rayzero.engine.unit import Unit
from rayzero.engine.wire import Wire, WireSlot
from rayzero.errors import NonFiniteGradientError
from tests.engine.delayed import Late
from tests.engine.random_models import ModelRecipe, PartRecipe
from tests.engine.random_runs import RunRecipe, Story, runs, train_engine
from tests.ranks import Pools, RankContext

LATE_EXAMPLES = 60
BLOCKS = ModelRecipe(
    width=6,
    parts=tuple(PartRecipe(hidden=8, dtype="fp32", extras=("scalar", "inner")) for _ in range(5)),
    calls=(0, 1, 2, 3, 4),
    input_grad=True,
)
"""Enough units that buffers are used again and gathers run ahead."""


def both_ways(ctx: RankContext, run: RunRecipe) -> tuple[Story, Story]:
    """Train with transfers that come at once, and with late ones."""
    with ThreadPoolExecutor(max_workers=1) as worker:
        late = train_engine(ctx, run, lambda group, device_type: Late(group, worker))
    return train_engine(ctx, run, transport_for), late


def assert_nothing_changes(ranks: Pools, run: RunRecipe) -> None:
    """Assert that late transfers change no bit and no line of the ledger."""
    for prompt, late in ranks(run.world)(both_ways, run):
        late.assert_same_as(prompt, run)


def named_runs() -> dict[str, RunRecipe]:
    """Name every stage with the options that decide when buffers are used again."""
    zeros = {
        f"stage {stage} in {name}": ZeroOptions(
            stage=stage, bucket_elements=bucket, overlap=overlap
        )
        for stage in (0, 1, 2)
        for name, bucket, overlap in (
            ("many buckets", 1, True),
            ("some buckets", 60, True),
            ("buckets one by one", 60, False),
        )
    }
    zeros |= {
        "stage 3": ZeroOptions(stage=3),
        "stage 3 one by one": ZeroOptions(stage=3, overlap=False),
        "stage 3 far ahead": ZeroOptions(stage=3, prefetch_elements=10**6),
        "stage 3 with whole parameters": ZeroOptions(stage=3, persistence_elements=6),
        "stage 3 in one unit": ZeroOptions(stage=3, units=()),
    }
    found = {
        n: RunRecipe(BLOCKS, zero=z, weights=(1, 2), lasts=(True, True)) for n, z in zeros.items()
    }
    for stage in range(4):
        found[f"stage {stage} in two groups"] = RunRecipe(
            BLOCKS, world=4, replicate=2, zero=ZeroOptions(stage=stage, bucket_elements=60)
        )
    return found


NAMED = named_runs()


@pytest.mark.parametrize("name", NAMED)
def test_late_transfers_change_nothing_at_any_stage(ranks: Pools, name: str) -> None:
    """E19."""
    assert_nothing_changes(ranks, NAMED[name])


def test_late_transfers_change_nothing_for_any_model(ranks: Pools) -> None:
    @settings(
        max_examples=LATE_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(runs())
    def check(run: RunRecipe) -> None:
        assert_nothing_changes(ranks, run)

    check()


def one_slot_for_all(wire: Wire) -> WireSlot:
    """Reuse the send buffer of a reduction that is still under way."""
    first, wire._next = wire._next, 0
    slot = SLOT(wire)
    wire._next = first
    return slot


def use_before_it_came(unit: Unit) -> None:
    """Compute with parameters that are still coming."""
    unit.start_unshard()
    handles, unit._handles = unit._handles, []
    UNSHARD(unit)
    unit._handles = handles


SLOT, UNSHARD = Wire._slot, Unit.unshard
FAULTS = {
    "one slot for all": (Wire, "_slot", one_slot_for_all, NAMED["stage 2 in many buckets"]),
    "use before it came": (Unit, "unshard", use_before_it_came, NAMED["stage 3"]),
}


def shows(ctx: RankContext, name: str) -> bool:
    """Train with a fault planted in the engine; say whether weights or gradients are wrong."""
    owner, attribute, fault, run = FAULTS[name]
    right, sound = train_engine(ctx, run), getattr(owner, attribute)
    setattr(owner, attribute, fault)
    try:
        with ThreadPoolExecutor(max_workers=1) as worker:
            wrong = train_engine(ctx, run, lambda group, device_type: Late(group, worker))
    except NonFiniteGradientError:
        return True
    finally:
        setattr(owner, attribute, sound)
    return not all(torch.equal(v, wrong.weights[name]) for name, v in right.weights.items())


@pytest.mark.parametrize("name", FAULTS)
def test_late_transfers_show_a_buffer_that_is_not_waited_for(ranks: Pools, name: str) -> None:
    assert ranks(2)(shows, name) == [True, True]
