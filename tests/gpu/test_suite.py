"""Every stage on a device trains what one plain process trains, and holds what theory says.

The scripts are those of tests/engine. On CUDA sums have an order of their own: fp64, and a bound.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero.engine import OffloadOptions, ZeroOptions
from rayzero.records import Kind
from rayzero.theory.memory import holdings_of
from rayzero.theory.traffic import step_transfers
from tests.engine.harness import EVERY_STAGE, STAGE_3, Script, assert_trains_like_plain
from tests.engine.reference import bit_equal, largest_difference
from tests.engine.test_accumulation import Heads, heads_loss
from tests.engine.test_participation import (
    Frozen,
    GatedStack,
    Spare,
    Unrolled,
    frozen_loss,
    gated_loss,
    spare_loss,
    unrolled_loss,
)
from tests.engine.test_torch_modules import Attention, Convolution, Normed, sequence_loss
from tests.gpu.cases import places, question_of, stack_engine, train
from tests.ranks import Pools, RankContext

DEADLINE_S = 300.0
SCRIPTS = {
    "heads": Script(make=Heads, loss=heads_loss, micros=4),
    "spare": Script(make=Spare, loss=spare_loss),
    "frozen": Script(make=partial(Frozen, "first", "norm"), loss=frozen_loss),
    "unrolled": Script(make=Unrolled, loss=unrolled_loss, micros=2),
    "attention": Script(make=Attention, loss=sequence_loss, steps=2),
    "convolution": Script(make=Convolution, loss=sequence_loss, steps=2),
    "norm": Script(make=Normed, loss=sequence_loss, steps=2),
}
TWO_RANKS = {"gates": Script(make=GatedStack, loss=gated_loss), "frozen": SCRIPTS["frozen"]}
OPTIONS = [*EVERY_STAGE, *STAGE_3]
PLACES = len(places(Path()))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_stage_trains_like_one_process_on_the_host(pools: Pools, name: str) -> None:
    assert_trains_like_plain(pools, SCRIPTS[name], world=1, options=OPTIONS, bound=1e-9)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_train_like_one_process_on_the_host(two_ranks: Pools, name: str) -> None:
    assert_trains_like_plain(two_ranks, TWO_RANKS[name], world=2, options=OPTIONS, bound=1e-9)


def trained(
    ctx: RankContext, zero: ZeroOptions, offload: OffloadOptions, params: str
) -> dict[str, Any]:
    """Train the stack; return weights, and bytes and transfers beside theory's."""
    with stack_engine(ctx, zero, offload, params) as engine:
        train(engine, ctx, params=params)
        question = question_of(engine, zero, offload, params)
        return {
            "held": {(e.kind, e.where): e for e in engine.holdings().entries},
            "held formula": {(e.kind, e.where): e for e in holdings_of(question).entries},
            "sent": sorted(map(str, engine.ledger.transfers)),
            "sent formula": sorted(map(str, step_transfers(question, backwards=2, reductions=1))),
            "gathered": engine.holdings().bytes_of(Kind.GATHERED),
            "weights": engine.full_state_dict(all_ranks=True),
        }


def check(pools: Pools, world: int, zero: ZeroOptions, offload: OffloadOptions, params: str) -> Any:
    """Train on all ranks and hold each against theory; return rank 0's weights."""
    results = pools(world)(trained, zero, offload, params, deadline_s=DEADLINE_S)
    for result in results:
        assert result["held"] == result["held formula"], f"{zero} {offload}"
        assert result["sent"] == result["sent formula"], f"{zero} {offload}"
        assert result["gathered"] == 0
        assert bit_equal(result["weights"], results[0]["weights"])
    return results[0]["weights"]


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_bytes_held_and_sent_equal_theory(two_ranks: Pools, params: str) -> None:
    found = [
        check(two_ranks, 2, ZeroOptions(stage=stage, overlap=overlap), OffloadOptions(), params)
        for stage in range(4)
        for overlap in (False, True)
    ]
    bound = 0.01 * 0.01 * 3 if params == "fp32" else 0.03
    for weights, with_overlap in zip(found[::2], found[1::2], strict=True):
        assert bit_equal(weights, with_overlap), "overlap changes bits"
        assert largest_difference(weights, found[0]) <= bound


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_offload_trains_alike_and_holds_theorys_bytes(
    pools: Pools, tmp_path: Path, params: str
) -> None:
    """On CUDA the optimizer of offloaded states is the host's, which rounds otherwise."""
    bound = 0.01 * 0.01 * 3 if params == "fp32" else 0.03
    plain = None
    for offload in places(tmp_path):
        weights = check(pools, 1, ZeroOptions(stage=3), offload, params)
        plain = weights if plain is None else plain
        assert largest_difference(weights, plain) <= (bound if pools.device == "cuda" else 0.0)
    assert not list(tmp_path.iterdir())


def lagged(
    ctx: RankContext, zero: ZeroOptions, offload: OffloadOptions, lags: bool
) -> dict[str, torch.Tensor]:
    with stack_engine(ctx, zero, offload) as engine:
        train(engine, ctx, lags=lags)
        return engine.full_state_dict(all_ranks=True)


@pytest.mark.parametrize("index", range(PLACES))
def test_a_device_that_lags_behind_the_host_changes_no_bit(
    pools: Pools, tmp_path: Path, index: int
) -> None:
    """E71: a copy to the host that nobody waits for would bring the values of before."""
    offload = places(tmp_path)[index]
    pool = pools(1)
    prompt = pool(lagged, ZeroOptions(stage=3), offload, False, deadline_s=DEADLINE_S)[0]
    late = pool(lagged, ZeroOptions(stage=3), offload, True, deadline_s=DEADLINE_S)[0]
    assert bit_equal(prompt, late)


@pytest.mark.parametrize("stage", range(4))
def test_two_lagging_ranks_change_no_bit(two_ranks: Pools, stage: int) -> None:
    zero = ZeroOptions(stage=stage, bucket_elements=5000)
    pool = two_ranks(2)
    prompt = pool(lagged, zero, OffloadOptions(), False, deadline_s=DEADLINE_S)
    late = pool(lagged, zero, OffloadOptions(), True, deadline_s=DEADLINE_S)
    assert all(bit_equal(a, b) for a, b in zip(prompt, late, strict=True))


def saved_and_loaded(ctx: RankContext, folder: str) -> bool:
    with stack_engine(ctx, ZeroOptions(stage=3)) as engine:
        train(engine, ctx)
        engine.save(folder)
        saved = engine.full_state_dict(all_ranks=True)
    with stack_engine(ctx, ZeroOptions(stage=1)) as other:
        other.load(folder)
        return bit_equal(saved, other.full_state_dict(all_ranks=True))


def test_a_checkpoint_of_a_device_loads_at_another_stage(pools: Pools, tmp_path: Path) -> None:
    assert pools(1)(saved_and_loaded, str(tmp_path / "saved"), deadline_s=DEADLINE_S) == [True]
