"""What a layer keeps for backward is what the formula with t says, to the byte."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rayzero.config.model import Checkpointing
from rayzero.dist.comm import Communicator
from rayzero.theory.activations import Layer, layer_activation_bytes
from tests.ranks import Pools, RankContext
from tests.tp.cases import SMALL, batch_of, cut_model

BATCH, SEQ = 3, 12
CONFIG = replace(SMALL, ffn_hidden=4 * SMALL.hidden)


def kept_bytes(context: RankContext, num_layers: int, sequence: bool) -> int:
    """Sum the distinct storages that a forward keeps for backward, parameters aside."""
    comm = Communicator(context.mesh(tp=context.world))
    config = replace(CONFIG, num_layers=num_layers)
    model, _ = cut_model(config, torch.bfloat16, comm, sequence=sequence)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(*batch_of(config))
    comm.close()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def layer_bytes(context: RankContext, sequence: bool) -> int:
    """Return what one more layer keeps."""
    one, three = (kept_bytes(context, layers, sequence) for layers in (1, 3))
    return (three - one) // 2


def formula_bytes(tp: int, sequence: bool) -> Fraction:
    """Without scores, as fused attention keeps none; without the two masks, for want of dropout.

    Beside it: mean and deviation of two norms, and in fp32 attention's logarithms of sums.
    """
    layer = Layer(
        seq=SEQ,
        batch=BATCH,
        hidden=CONFIG.hidden,
        heads=CONFIG.num_heads,
        tp=tp,
        sequence_parallel=sequence,
        checkpointing=Checkpointing.SELECTIVE,
    )
    tokens = SEQ * BATCH
    own = Fraction(tokens, tp) if sequence else Fraction(tokens)
    masks, statistics = 2 * own * CONFIG.hidden, 4 * 2 * own
    sums = 4 * tokens * Fraction(CONFIG.num_heads, tp)
    return layer_activation_bytes(layer) - masks + statistics + sums


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_keeps_the_formulas_bytes(ranks: Pools, tp: int, sequence: bool) -> None:
    """Korthikanti et al., equations 2 and 4: 10 + 24/t, and with sequence parallelism 34/t."""
    for found in ranks(tp)(layer_bytes, sequence):
        assert found == formula_bytes(tp, sequence)
