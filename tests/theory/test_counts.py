"""Parameter and operation counts: against published formulas, printed sizes and torch's counter."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rayzero.config.model import Checkpointing, Flavour, ModelConfig
from rayzero.models.transformer import Transformer
from rayzero.theory.counts import num_params, training_flops
from tests.theory.test_shapes import named

SHAPES = ["124M", "1.5B", "7.5B", "175B", "1T"]


@pytest.mark.parametrize(
    ("size", "params"),
    [
        ("tiny", 182_016),
        ("124M", 124_439_808),
        ("350M", 354_823_168),
        ("1.5B", 1_557_611_200),
        ("7B", 6_738_415_616),
        ("13B", 13_015_864_320),
        ("30B", 32_528_943_616),
        ("65B", 65_285_660_672),
    ],
)
def test_published_models_have_their_published_number_of_parameters(size: str, params: int) -> None:
    assert num_params(named(size)) == params


@pytest.mark.parametrize(
    ("size", "params"),
    [
        ("30M", 30e6),
        ("34M", 30e6),
        ("1.3B", 1.3e9),
        ("7.5B", 7.5e9),
        ("128B", 128e9),
        ("175B", 175e9),
        ("1T", 1e12),
    ],
)
def test_sizes_are_what_their_names_say(size: str, params: float) -> None:
    assert num_params(named(size)) == pytest.approx(params, rel=0.035)


@pytest.mark.parametrize("size", SHAPES)
def test_parameters_follow_narayanan_equation_2(size: str) -> None:
    """12 l h^2 (1 + 13/(12h) + (V+s)/(12lh)), which leaves out the final norm's 2h."""
    c = named(size)
    h, layers, v, s = c.hidden, c.num_layers, c.vocab_size, c.max_seq_len
    formula = 12 * layers * h * h + 13 * layers * h + (v + s) * h
    assert num_params(c) == formula + 2 * h


@pytest.mark.parametrize("size", SHAPES)
def test_model_flops_follow_korthikanti_equation_7(size: str) -> None:
    c, batch, s = named(size), 8, 2048
    h, layers, v = c.hidden, c.num_layers, c.vocab_size
    formula = 72 * batch * layers * s * h * h * (1 + s / (6 * h) + v / (12 * h * layers))
    flops = training_flops(c, seq_len=s, num_tokens=batch * s)
    assert flops.model == pytest.approx(formula, rel=1e-12)
    assert flops.hardware == flops.model


@pytest.mark.parametrize("size", SHAPES)
def test_full_checkpointing_follows_narayanan_equation_3(size: str) -> None:
    c, batch, s = replace(named(size), checkpointing=Checkpointing.FULL), 8, 2048
    h, layers, v = c.hidden, c.num_layers, c.vocab_size
    formula = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    flops = training_flops(c, seq_len=s, num_tokens=batch * s)
    assert flops.hardware == pytest.approx(formula, rel=1e-12)
    assert flops.model == training_flops(named(size), seq_len=s, num_tokens=batch * s).model


@pytest.mark.parametrize("mode", Checkpointing)
@pytest.mark.parametrize("flavour", Flavour)
def test_hardware_flops_are_what_torch_counts(flavour: Flavour, mode: Checkpointing) -> None:
    """torch stops recomputing before a function's last product, which backward does not need.

    Its counter does not see a fused attention kernel on the CPU, so plain products are used.
    """
    config = ModelConfig(
        flavour=flavour, num_layers=3, hidden=64, vocab_size=96, checkpointing=mode, num_kv_heads=4
    )
    model, tokens = Transformer(config), torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    flops = training_flops(config, seq_len=32, num_tokens=tokens.numel())
    last_product = {
        Checkpointing.NONE: 0,
        Checkpointing.SELECTIVE: 2 * 32 * config.hidden,
        Checkpointing.FULL: 2 * config.hidden * config.ffn,
    }[mode]
    skipped = tokens.numel() * config.num_layers * last_product
    assert counter.get_total_flops() == flops.hardware - skipped
