"""Any small model under any options trains what one plain process trains and leaves none behind.

RAYZERO_EXAMPLES=5000 draws that many runs at random instead of the fixed ones of CI.
"""

import os
import tempfile
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings

from rayzero.engine import OffloadOptions, ZeroOptions
from rayzero.records import Kind, Phase, Transfer
from tests.engine.random_models import ModelRecipe, PartRecipe
from tests.engine.random_runs import DRAWN, RunRecipe, Story, runs, train_engine, train_plain
from tests.ranks import Pools

EXAMPLES = int(os.environ.get("RAYZERO_EXAMPLES", "300"))
BOUNDS = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 0.03}
"""Of weights: orders of sums differ. bf16 weights are rounded: a last bit of a weight near 2."""


@pytest.mark.timeout(max(300, EXAMPLES))
def test_any_model_trains_like_one_plain_process(ranks: Pools) -> None:
    seen: Counter[str] = Counter()
    DRAWN.clear()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize="RAYZERO_EXAMPLES" not in os.environ,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(runs())
    def check(run: RunRecipe) -> None:
        features = features_of(run)
        seen.update(features)
        seen["runs"] += 1
        for feature in features:
            event(feature)
        check_run(run, ranks(run.world)(train_engine, run))

    check()
    print("\n" + "\n".join(f"{count:6} {name}" for name, count in sorted(seen.items())))
    assert seen["runs"] >= 0.95 * DRAWN["started"], "more than 5% of the draws were discarded"
    missing = [name for name in FEATURES if not seen[name]]
    assert not missing, f"no run had {missing}"
    rare = [s for s in range(4) if seen[f"stage {s}"] < 0.15 * seen["runs"]]
    assert not rare, f"less than 15% of the runs were of stages {rare}"


ONCE_FAILED = {
    "a dtype whose only flats are empty": RunRecipe(
        ModelRecipe(width=0, parts=(PartRecipe(hidden=4, dtype="bf16"),)),
        zero=ZeroOptions(stage=3, units=("parts.0",)),
    ),
    "frozen and replicated at stage 0": RunRecipe(
        ModelRecipe(parts=(PartRecipe(hidden=8, frozen="all"),), input_grad=True),
        world=4,
        replicate=2,
    ),
    "gates that differ by rank beside gathers": RunRecipe(
        ModelRecipe(
            parts=(PartRecipe(extras=("gate",)), PartRecipe(extras=("gate",))),
            calls=(0, 1),
            input_grad=True,
        ),
        zero=ZeroOptions(stage=3, overlap=False),
        weights=(1.0, 1.0),
        lasts=(True, True),
    ),
    "a recomputation after all gradients that came last time": RunRecipe(
        ModelRecipe(
            parts=(PartRecipe(checkpoint="not reentrant", sits_out=0b101_010_101), PartRecipe()),
            calls=(0, 1),
        ),
        zero=ZeroOptions(stage=3, units=("parts.1",)),
        weights=(1.0, 1.0, 1.0),
        lasts=(False, True, False),
    ),
    "tied to a parameter that stays whole": RunRecipe(
        ModelRecipe(
            parts=(
                PartRecipe(hidden=0, extras=("scalar",)),
                PartRecipe(hidden=0, extras=("scalar",), tied_to=0),
            ),
            calls=(0, 1),
            input_grad=True,
        ),
        zero=ZeroOptions(stage=3),
    ),
    "two dtypes on disk in turn": RunRecipe(
        ModelRecipe(parts=(PartRecipe(dtype="fp32"),), input_grad=True),
        zero=ZeroOptions(stage=1, bucket_elements=10),
        offload=OffloadOptions(optimizer="disk", folder=tempfile.gettempdir()),
    ),
    "nothing on disk": RunRecipe(
        ModelRecipe(width=0, parts=(PartRecipe(hidden=0, extras=("empty",)),)),
        zero=ZeroOptions(stage=2),
        offload=OffloadOptions(optimizer="disk", folder=tempfile.gettempdir(), fraction=0.5),
        num_groups=2,
    ),
}
"""Draws that found faults of the engine or of theory, cut down to what is needed."""


@pytest.mark.parametrize("name", ONCE_FAILED)
def test_runs_that_once_failed(ranks: Pools, name: str) -> None:
    run = ONCE_FAILED[name]
    check_run(run, ranks(run.world)(train_engine, run))


def check_run(run: RunRecipe, stories: list[Story]) -> None:
    """Assert that the ranks tell one story, REF's, and what theory foretells."""
    first = stories[0]
    for story in stories:
        assert not story.left_behind, story.left_behind
        assert story.transfers == first.transfers, "the ranks' ledgers differ"
        for name, value in first.weights.items():
            assert torch.equal(story.weights[name], value), f"ranks differ in {name}"
        check_holdings(run, story)
        check_traffic(run, story)
    weights, norms = train_plain(run)
    bound = max(BOUNDS[dtype] for dtype in run.model.dtypes)
    assert first.norms == pytest.approx(norms, rel=max(100 * bound**2, bound), abs=bound)
    assert first.weights.keys() == weights.keys()
    for name, value in weights.items():
        if value.numel():
            difference = float((first.weights[name].double() - value.double()).abs().max())
            assert difference <= bound, f"{name} differs by {difference}"


def check_holdings(run: RunRecipe, story: Story) -> None:
    """Bytes held equal the formula; reductions before the last leave gradients set aside."""
    sets_aside = run.zero.stage < 2 and (run.num_reductions > 1 or run.model.may_come_late)
    skipped = {Kind.GRADIENTS} if sets_aside else set()
    held = {e for e in story.held if e.kind not in skipped}
    assert held == {e for e in story.held_formula if e.kind not in skipped}


def check_traffic(run: RunRecipe, story: Story) -> None:
    """Transfers of each step equal the formula, as far as it speaks of the model.

    Of gathers at stage 3 it speaks where each unit runs once and backward; of a window in which
    gradients came late it does not speak.
    """
    formula = Counter(story.formula)
    for transfers in story.transfers:
        found = Counter(transfers)
        came_late = any(n > 1 for t, n in found.items() if t.unit == "window")
        if came_late:
            assert run.model.may_come_late
        elif run.zero.stage < 3 or run.model.is_plain:
            assert found == formula
        else:
            reduced = [{t: n for t, n in c.items() if not is_gather(t)} for c in (found, formula)]
            assert reduced[0] == reduced[1]


def is_gather(transfer: Transfer) -> bool:
    """Whether a transfer gathers a unit for use."""
    return transfer.op == "all_gather" and transfer.phase in (Phase.FORWARD, Phase.BACKWARD)


def features_of(run: RunRecipe) -> set[str]:
    """Name what a run is a case of."""
    model, zero = run.model, run.zero
    named = {
        "tied": model.ties,
        "reused": model.reuses,
        "frozen": model.freezes,
        "branches": model.has_branches,
        "never called": len(set(model.calls)) < len(model.parts),
        "width 0": model.width == 0,
        "0-dim": any("scalar" in part.extras for part in model.parts),
        "empty": any("empty" in part.extras for part in model.parts),
        "nested units": zero.stage == 3 and any(n.endswith("inner") for n in zero.units or ()),
        "mixed dtypes": len(model.dtypes) > 1,
        "groups": run.num_groups > 1,
        "accumulation": len(run.lasts) > 1,
        "promise broken": not run.lasts[-1],
        "clip": run.max_grad_norm is not None,
        "replicate": run.replicate > 1,
        "prefetch": zero.stage == 3 and zero.overlap and zero.prefetch_elements != 0,
        "persistence": zero.stage == 3 and zero.persistence_elements > 0,
        "parameters on host": run.offload.params == "host",
        "parameters on disk": run.offload.params == "disk",
        "all on disk": run.offload.params == run.offload.optimizer == "disk",
        "overlap": zero.overlap,
        "no overlap": not zero.overlap,
        "gathers equal theory": zero.stage == 3 and run.world > run.replicate and model.is_plain,
    }
    numbered = {f"stage {zero.stage}", f"{run.world} ranks", run.optimizer}
    numbered |= {f"states on {run.offload.optimizer}"}
    kinds = {f"checkpoint {kind}" for kind in model.checkpoints} | model.dtypes
    return {name for name, holds in named.items() if holds} | numbered | kinds


FEATURES = [
    *(f"stage {stage}" for stage in range(4)),
    *(f"{world} ranks" for world in range(1, 5)),
    *("adamw", "sgd", "fp64", "fp32", "bf16", "mixed dtypes", "groups"),
    *("tied", "reused", "frozen", "branches", "never called", "width 0", "0-dim", "empty"),
    *("checkpoint reentrant", "checkpoint not reentrant", "nested units", "replicate"),
    *("accumulation", "promise broken", "clip", "overlap", "no overlap"),
    *("prefetch", "persistence", "gathers equal theory"),
    *("states on none", "states on host", "states on disk"),
    *("parameters on host", "parameters on disk", "all on disk"),
]
"""Each of them is drawn at least once."""
