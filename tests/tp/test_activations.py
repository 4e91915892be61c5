"""What a layer keeps for backward is what the formula with t says, to the byte."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rayzero.config.model import Checkpointing
from rayzero.dist.comm import Communicator
from rayzero.theory.activations import Layer, kept_layer_bytes, layer_activation_bytes
from tests.ranks import Pools, RankContext
from tests.tp.cases import MODELS, SMALL, batch_of, cut_model

BATCH, SEQ = 3, 12


def kept_bytes(context: RankContext, name: str, num_layers: int, sequence: bool) -> int:
    """Sum the distinct storages that a forward keeps for backward, parameters aside."""
    comm = Communicator(context.mesh(tp=context.world))
    config = replace(MODELS[name], num_layers=num_layers)
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


def layer_bytes(context: RankContext, name: str, sequence: bool) -> int:
    """Return what one more layer keeps."""
    one, three = (kept_bytes(context, name, layers, sequence) for layers in (1, 3))
    return (three - one) // 2


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt2 tied", "llama grouped queries"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_keeps_the_formulas_bytes(ranks: Pools, tp: int, name: str, sequence: bool) -> None:
    formula = kept_layer_bytes(
        MODELS[name], seq=SEQ, batch=BATCH, itemsize=2, tp=tp, sequence_parallel=sequence
    )
    for found in ranks(tp)(layer_bytes, name, sequence):
        assert found == formula


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_the_count_is_the_papers_less_masks_with_statistics(tp: int, sequence: bool) -> None:
    """Korthikanti et al., equations 2 and 4: 10 + 24/t, and with sequence parallelism 34/t."""
    model = replace(SMALL, ffn_hidden=4 * SMALL.hidden)
    shape = {"seq": SEQ, "batch": BATCH, "tp": tp, "sequence_parallel": sequence}
    layer = Layer(
        hidden=model.hidden,
        heads=model.num_heads,
        checkpointing=Checkpointing.SELECTIVE,
        **shape,  # type: ignore[arg-type]
    )
    own = SEQ * BATCH // tp if sequence else SEQ * BATCH
    masks, statistics = 2 * own * model.hidden, 4 * 2 * own
    sums = 4 * SEQ * BATCH * model.num_heads // tp
    paper = layer_activation_bytes(layer) - masks + statistics + sums
    assert kept_layer_bytes(model, itemsize=2, **shape) == paper  # type: ignore[arg-type]
