"""The papers' closed forms, and flat-by-flat theory held against them."""

from fractions import Fraction

import pytest

from rayzero.config.build import build
from rayzero.records import Carrier, Kind, Phase
from rayzero.theory.memory import STATES, holdings_of
from rayzero.theory.paper import (
    CONVENTIONS,
    break_even_many_ranks,
    break_even_same_ranks,
    states_per_param,
    step_volume,
)
from rayzero.theory.question import question_of
from rayzero.theory.traffic import step_transfers

PAPER = {"params": "bf16", "reduce": "bf16", "accumulate": "bf16"}


@pytest.mark.parametrize("stage", range(4))
def test_states_flat_by_flat_are_the_closed_form_plus_padding(stage: int) -> None:
    config = build({"zero": {"stage": stage}, "precision": PAPER, "data": {"global_batch": 64}})
    question = question_of(config, world=64, rank=63, carrier=Carrier.NATIVE)
    states = [e for e in holdings_of(question).entries if e.kind in STATES]
    num_bytes = sum(e.num_bytes for e in states)
    psi = sum(flat.numel for flat in question.layouts)
    padded = sum(flat.padded for flat in question.layouts)
    each = states_per_param(CONVENTIONS[16], stage=stage, shards=64)
    assert num_bytes == each * padded
    assert {e.kind for e in states} == {Kind.PARAMETERS, Kind.GRADIENTS, Kind.MASTER, Kind.MOMENTS}
    assert padded - psi < 64 * 32 * len(question.layouts)


@pytest.mark.parametrize("micro_steps", [1, 2, 8])
@pytest.mark.parametrize("stage", range(4))
def test_the_papers_volumes_are_the_special_case_without_ties(stage: int, micro_steps: int) -> None:
    config = build(
        {"zero": {"stage": stage}, "model": {"tied_output": False}, "data": {"global_batch": 64}}
    )
    question = question_of(config, world=64, rank=5, carrier=Carrier.NATIVE)
    padded = sum(flat.padded for flat in question.layouts)
    elements = sum(
        t.elements * (2 if t.op == "all_reduce" else 1)
        for t in step_transfers(question, backwards=micro_steps)
        if t.phase is not Phase.CONTROL
    )
    assert elements == step_volume(stage=stage, micro_steps=micro_steps) * padded


def test_break_even_is_where_the_claims_put_it() -> None:
    dense = Fraction(12 * 4096**2)
    assert break_even_same_ranks(dense, all_reduces=4, hidden=4096, tp=4) == 4608
    assert break_even_same_ranks(dense, all_reduces=6, hidden=4096, tp=4) == 3072
    assert break_even_many_ranks(dense, all_reduces=4, hidden=4096, tp=4) == 5120


def test_conventions_are_named_by_their_total() -> None:
    assert {name: convention.total for name, convention in CONVENTIONS.items()} == {
        16: 16,
        18: 18,
        20: 20,
    }
