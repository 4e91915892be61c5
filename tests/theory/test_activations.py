"""Activation formulas against the papers' printed figures."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from rayzero.config.model import Checkpointing, Flavour, ModelConfig
from rayzero.dist.storage_trace import StorageTrace
from rayzero.errors import ConfigError
from rayzero.models.transformer import Transformer
from rayzero.studies.facts import Fact, read_facts
from rayzero.theory.activations import (
    Layer,
    ends_activation_bytes,
    kept_layer_bytes,
    layer_activation_bytes,
    layers_on_first_stage,
)

GIB = 2**30
PRINTED_GIB = 0.006
"""Half of the last printed digit, and a little."""
READ_OFF_PERCENT = 0.2
"""Figure 7 is redrawn: points of a percentage."""
FACTS = read_facts("seqsel_activations")
ROW = Layer(seq=2048, batch=3, hidden=1024, heads=16, tp=8)
SBH = ROW.seq * ROW.batch * ROW.hidden
SCORES = Fraction(5 * ROW.heads * ROW.seq, ROW.hidden)


def layer_of(fact: Fact) -> Layer:
    return Layer(
        seq=int(fact["seq"]),
        batch=int(fact["micro_batch"]),
        hidden=int(fact["hidden"]),
        heads=int(fact["heads"]),
        tp=int(fact["tp"]),
    )


def variants(layer: Layer) -> dict[str, Layer]:
    sharded = replace(layer, sequence_parallel=True)
    return {
        "none": layer,
        "seq_only": sharded,
        "selective_only": replace(layer, checkpointing=Checkpointing.SELECTIVE),
        "seq_and_sel": replace(sharded, checkpointing=Checkpointing.SELECTIVE),
        "full": replace(layer, checkpointing=Checkpointing.FULL),
    }


@pytest.mark.parametrize("fact", FACTS, ids=[fact["model"] for fact in FACTS])
def test_totals_of_four_models_are_those_printed(fact: Fact) -> None:
    kept = layers_on_first_stage(
        int(fact["layers"]), stages=int(fact["pp"]), chunks=int(fact["interleave_m"])
    )
    ways = variants(layer_of(fact))
    for way, column in (("none", "no_recompute"), ("seq_and_sel", "seq_sel")):
        found = float(kept * layer_activation_bytes(ways[way]) / GIB)
        assert found == pytest.approx(float(fact[f"activations_{column}_GiB"]), abs=PRINTED_GIB)


@pytest.mark.parametrize("fact", FACTS, ids=[fact["model"] for fact in FACTS])
def test_shares_that_remain_are_those_of_figure_7(fact: Fact) -> None:
    sizes = {way: layer_activation_bytes(one) for way, one in variants(layer_of(fact)).items()}
    for way in ("seq_only", "selective_only", "seq_and_sel", "full"):
        found = float(100 * sizes[way] / sizes["none"])
        assert found == pytest.approx(float(fact[f"fig7_pct_{way}"]), abs=READ_OFF_PERCENT)


@pytest.mark.parametrize(
    ("layer", "printed"),
    [
        (replace(ROW, tp=1), SBH * (34 + SCORES)),
        (ROW, SBH * (10 + Fraction(24, 8) + SCORES / 8)),
        (replace(ROW, sequence_parallel=True), Fraction(SBH, 8) * (34 + SCORES)),
        (replace(ROW, checkpointing=Checkpointing.SELECTIVE), SBH * (10 + Fraction(24, 8))),
        (
            replace(ROW, sequence_parallel=True, checkpointing=Checkpointing.SELECTIVE),
            Fraction(34 * SBH, 8),
        ),
        (replace(ROW, checkpointing=Checkpointing.FULL), Fraction(2 * SBH)),
    ],
    ids=["none", "tp", "tp and sp", "tp, selective", "tp, sp, selective", "full"],
)
def test_each_row_of_table_2(layer: Layer, printed: Fraction) -> None:
    assert layer_activation_bytes(layer) == printed


def test_what_stands_outside_the_layers() -> None:
    alone = ends_activation_bytes(ROW, stages=1, vocab=51200)
    assert alone == Fraction(SBH, 8) * (1 + 4 * (1 + Fraction(51200, 1024)))
    assert ends_activation_bytes(ROW, stages=4, vocab=51200) == Fraction(4 * SBH, 8)


def test_heads_that_tp_does_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp=3 does not divide heads=16"):
        replace(ROW, tp=3)


def held_after_forward(model: ModelConfig, dtype: torch.dtype, *, seq: int, batch: int) -> int:
    """Bytes that a forward leaves for backward, whoever holds them."""
    module = Transformer(model).to(dtype)
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    with StorageTrace([*module.parameters(), tokens], lambda: None) as trace:
        loss = module(tokens, tokens)
    assert loss.requires_grad
    return sum(change.delta_bytes for change in trace.changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", Checkpointing)
@pytest.mark.parametrize("num_kv_heads", [None, 2])
@pytest.mark.parametrize("flavour", Flavour)
def test_a_layer_of_our_models_keeps_the_counted_bytes(
    flavour: Flavour, num_kv_heads: int | None, checkpointing: Checkpointing, dtype: torch.dtype
) -> None:
    model = ModelConfig(
        flavour=flavour, num_kv_heads=num_kv_heads, checkpointing=checkpointing, num_layers=1
    )
    one, two = (
        held_after_forward(replace(model, num_layers=layers), dtype, seq=24, batch=2)
        for layers in (1, 2)
    )
    assert two - one == kept_layer_bytes(model, seq=24, batch=2, itemsize=dtype.itemsize)


def test_layers_whose_bytes_are_not_counted_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.dropout=0\.1 .*the dry run measures others"):
        kept_layer_bytes(ModelConfig(dropout=0.1), seq=8, batch=1, itemsize=4)
