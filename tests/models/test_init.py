"""Initial weights are a function of name and seed: any span, any cut, always the same values."""

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayzero.config.model import Flavour, ModelConfig
from rayzero.models.init import CHUNK_ELEMENTS, Initializer, Rule, draw, materialize
from rayzero.models.transformer import Transformer

TINY = ModelConfig()
NORMAL = Rule(std=0.02)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 3 * CHUNK_ELEMENTS), st.integers(0, 3 * CHUNK_ELEMENTS))
def test_any_span_equals_that_part_of_the_whole(a: int, b: int) -> None:
    numel = 3 * CHUNK_ELEMENTS
    start, stop = sorted((a, b))
    whole = draw("w", numel, 0, numel, seed=1, rule=NORMAL)
    assert torch.equal(draw("w", numel, start, stop, seed=1, rule=NORMAL), whole[start:stop])


def test_other_names_seeds_and_chunks_have_other_values() -> None:
    numel = 2 * CHUNK_ELEMENTS
    first = draw("w", numel, 0, numel, seed=0, rule=NORMAL)
    assert not torch.equal(first, draw("v", numel, 0, numel, seed=0, rule=NORMAL))
    assert not torch.equal(first, draw("w", numel, 0, numel, seed=1, rule=NORMAL))
    assert not torch.equal(first[:CHUNK_ELEMENTS], first[CHUNK_ELEMENTS:])


def test_values_are_these_on_every_machine() -> None:
    """Ranks on unlike machines must agree: these figures come from integers and a table."""
    values = draw("blocks.0.attention.q.weight", 1000, 997, 1000, seed=0, rule=Rule(std=1.0))
    assert values.tolist() == pytest.approx(PINNED, abs=1e-6)


PINNED = [0.11425398, 0.80964255, 0.38683304]


@pytest.mark.parametrize("flavour", Flavour)
def test_rules_by_kind_of_parameter(flavour: Flavour) -> None:
    config = ModelConfig(flavour=flavour, hidden=256, num_layers=8)
    initializer = Initializer(config, 0)
    with torch.device("meta"):
        model = Transformer(config)
    for name, parameter in model.named_parameters():
        values = initializer(name, 0, parameter.numel())
        if name.endswith("bias"):
            assert (values == 0).all(), name
        elif name.endswith("norm.weight"):
            assert (values == 1).all(), name
        else:
            narrow = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
            std = 0.02 / math.sqrt(16) if narrow else 0.02
            assert values.std().item() == pytest.approx(std, rel=0.02), name
            assert abs(values.mean().item()) < std / 50, name


def test_materialized_module_has_these_values_and_keeps_its_tie() -> None:
    with torch.device("meta"):
        model = Transformer(TINY)
    initializer = Initializer(TINY, 4)
    state = torch.get_rng_state()
    materialize(model, initializer, device=torch.device("cpu"), dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.output.weight is model.tokens.weight
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().flatten(), initializer(name, 0, parameter.numel()))


def test_a_span_of_a_huge_matrix_is_drawn_without_the_rest() -> None:
    config = ModelConfig(num_layers=128, hidden=25600, num_heads=160, vocab_size=51200)
    initializer = Initializer(config, 0)
    started = time.perf_counter()
    values = initializer("blocks.127.feed_forward.up.weight", 2_000_000_000, 2_000_100_000)
    assert time.perf_counter() - started < 2.0
    assert values.std().item() == pytest.approx(0.02, rel=0.02)
