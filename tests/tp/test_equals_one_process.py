"""A model cut over tp ranks has the loss and the gradients of the whole one."""

from dataclasses import replace

import pytest
import torch

from rayzero.config.model import Checkpointing
from rayzero.dist.comm import Communicator
from tests.ranks import Pools, RankContext
from tests.tp.cases import MODELS, batch_of, block_of, cut_model, whole_model

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


def largest_errors(
    context: RankContext, name: str, checkpointing: str, dtype: torch.dtype, sequence: bool = False
) -> dict:
    """Compare loss and every gradient, relative to the largest element of the whole one.

    A key's bias has no influence on softmax, so its gradient is rounding noise: no gradient is
    measured by less than a hundredth of the model's largest.
    """
    config = replace(MODELS[name], checkpointing=Checkpointing(checkpointing))
    comm = Communicator(context.mesh(tp=context.world))
    whole = whole_model(config, dtype)
    part, shards = cut_model(config, dtype, comm, sequence=sequence)
    inputs, targets = batch_of(config)
    expected, loss = whole(inputs, targets), part(inputs, targets)
    expected.backward()
    loss.backward()
    comm.close()
    wanted = {n: p.grad for n, p in whole.named_parameters()}
    got = {n: p.grad for n, p in part.named_parameters()}
    assert got.keys() == wanted.keys()
    floor = max(float(g.abs().max()) for g in wanted.values()) / 100
    errors = {"loss": abs(loss.item() / expected.item() - 1)}
    for key, gradient in got.items():
        block = block_of(wanted[key], shards.get(key))
        scale = max(float(wanted[key].abs().max()), floor)
        errors[key] = float((gradient - block).abs().max()) / scale
    return errors


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
def test_loss_and_every_gradient_are_those_of_the_whole_model(
    ranks: Pools, tp: int, name: str, dtype: torch.dtype
) -> None:
    for errors in ranks(tp)(largest_errors, name, "none", dtype):
        assert max(errors.values()) <= BOUNDS[dtype], errors


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("name", ["gpt2 tied", "llama grouped queries"])
@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism_changes_nothing(
    ranks: Pools, tp: int, name: str, checkpointing: str
) -> None:
    for errors in ranks(tp)(largest_errors, name, checkpointing, torch.float64, True):
        assert max(errors.values()) <= BOUNDS[torch.float64], errors


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_activation_checkpointing_changes_nothing(ranks: Pools, checkpointing: str) -> None:
    for errors in ranks(2)(largest_errors, "llama grouped queries", checkpointing, torch.float64):
        assert max(errors.values()) <= BOUNDS[torch.float64], errors


def replicated_gradients(context: RankContext, sequence: bool) -> dict[str, bytes]:
    """Return the bytes of every gradient that all tp ranks hold whole."""
    config = MODELS["gpt2 tied"]
    comm = Communicator(context.mesh(tp=context.world))
    part, shards = cut_model(config, torch.float32, comm, sequence=sequence)
    part(*batch_of(config)).backward()
    comm.close()
    whole = {n: p.grad for n, p in part.named_parameters() if n not in shards}
    return {name: gradient.numpy().tobytes() for name, gradient in whole.items()}


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_replicated_parameters_are_bit_equal_on_all_ranks(
    ranks: Pools, sequence: bool
) -> None:
    first, *others = ranks(4)(replicated_gradients, sequence)
    assert "blocks.0.attention.o.bias" in first
    assert "positions.weight" in first
    assert all(other == first for other in others)
