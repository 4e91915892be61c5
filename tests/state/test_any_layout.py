"""E73: what is saved at one stage, world and tp degree loads at any other, bit for bit."""

from pathlib import Path

import pytest

from tests.engine.reference import largest_difference
from tests.ranks import Pools
from tests.state.cases import LR, Layout, differences, load_and_go_on, save_and_go_on

RANKS = ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2))
LAYOUTS = [Layout(stage, world, tp) for stage in range(4) for world, tp in RANKS]
BOUND = 0.01 * LR * 3
"""fp32 AdamW: 1% of lr x steps, since other ranks sum in another order."""


OFFLOADED = [
    (Layout(3, 2, offload="disk"), Layout(1, 3)),
    (Layout(2, 2, offload="host"), Layout(3, 2, offload="disk")),
    (Layout(0, 4, 2), Layout(2, 2, offload="disk")),
    (Layout(2, 4, replicate=2), Layout(3, 2, offload="host")),
    (Layout(3, 4, replicate=2), Layout(0, 4, replicate=2)),
    (Layout(0, 4, replicate=2), Layout(1, 1)),
    (Layout(3, 2, offload="disk", offload_params="disk"), Layout(1, 3)),
    (Layout(2, 3), Layout(3, 4, 2, offload_params="disk")),
]


def elsewhere(index: int) -> Layout:
    """Pair each layout with another one; 7 is prime to 24, so that each is loaded at once, too."""
    return LAYOUTS[(7 * index + 5) % len(LAYOUTS)]


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_a_checkpoint_resumes_at_its_layout_and_loads_at_another(
    ranks: Pools, tmp_path: Path, index: int
) -> None:
    check(ranks, tmp_path / "saved", LAYOUTS[index], elsewhere(index))


@pytest.mark.parametrize(("here", "there"), OFFLOADED)
def test_offloaded_states_and_replicas_are_saved_and_loaded_like_others(
    ranks: Pools, tmp_path: Path, here: Layout, there: Layout
) -> None:
    check(ranks, tmp_path / "saved", here, there)


def check(ranks: Pools, folder: Path, here: Layout, there: Layout) -> None:
    """Save at one layout and resume there, to the bit; go on at another within BOUND."""
    assert here != there
    results = ranks(here.world)(save_and_go_on, here, folder)
    for _, _, wrong in results:
        assert not wrong, f"{here} after a load: {wrong}"
    saved, final, _ = results[0]
    loaded, trained = ranks(there.world)(load_and_go_on, there, folder)[0]
    assert not differences(saved, loaded), f"{here} -> {there}"
    assert any(name.startswith("exp_avg_sq/") for name in saved)
    weights = [{k: v for k, v in s.items() if k.startswith("weights/")} for s in (final, trained)]
    assert largest_difference(*weights) <= BOUND, f"{here} -> {there}"
