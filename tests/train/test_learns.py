"""Text is learnt at stage 3, as far as the bytes allow; shuffled targets are not."""

import pytest

from rayzero.config.build import build
from tests.ranks import Pools
from tests.train.test_cell import run

UNIGRAM_ENTROPY = 3.25
"""Nats per byte of the default text; nothing below it is learnt without looking at the input."""


def _validation_loss(ranks: Pools, *, shuffle_targets: bool) -> float:
    config = build(
        {
            "zero": {"stage": 3},
            "data": {"shuffle_targets": shuffle_targets},
            "run": {"num_steps": 197, "warmup_steps": 3, "validate": True, "probe": False},
        }
    )
    reports = [report for report, _ in ranks(2)(run, config, deadline_s=110.0)]
    assert reports[0].validation_loss == reports[1].validation_loss
    assert reports[0].steps[0].loss == pytest.approx(5.5, abs=0.2)
    loss = reports[0].validation_loss
    assert loss is not None
    return loss


@pytest.mark.slow
def test_200_steps_of_tiny_at_stage_3_learn_python(ranks: Pools) -> None:
    assert _validation_loss(ranks, shuffle_targets=False) < 2.9


@pytest.mark.slow
def test_shuffled_targets_are_not_learnt(ranks: Pools) -> None:
    assert _validation_loss(ranks, shuffle_targets=True) > UNIGRAM_ENTROPY - 0.25
