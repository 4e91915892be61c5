"""torch's own tensor parallelism cuts the same model: the same loss and gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rayzero.dist.comm import Communicator
from tests.ranks import Pools, RankContext
from tests.tp.cases import LLAMA, batch_of, block_of, cut_model, whole_model

CONFIG = replace(LLAMA, num_kv_heads=4)


def torchs_plan(sequence: bool) -> dict[str, ParallelStyle]:
    """Return Megatron's cuts in torch's words; logits are made whole for torch's loss."""
    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for index in range(CONFIG.num_layers):
        block = f"blocks.{index}"
        for name in ("attention.q", "attention.k", "attention.v"):
            plan[f"{block}.{name}"] = ColwiseParallel()
        for name in ("feed_forward.gate", "feed_forward.up"):
            plan[f"{block}.{name}"] = ColwiseParallel()
        for name in ("attention.o", "feed_forward.down"):
            plan[f"{block}.{name}"] = RowwiseParallel(output_layouts=stream)
        if sequence:
            for name in ("attention_norm", "feed_forward_norm"):
                plan[f"{block}.{name}"] = SequenceParallel()
            plan[f"{block}.attention"] = PrepareModuleInput(
                input_layouts=(stream, None), desired_input_layouts=(Replicate(), None)
            )
            plan[f"{block}.feed_forward"] = PrepareModuleInput(
                input_layouts=(stream,), desired_input_layouts=(Replicate(),)
            )
    return plan


def whole(tensor: Tensor | None) -> Tensor:
    """Return a gradient as one tensor."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def errors_beside_torch(context: RankContext, sequence: bool) -> dict[str, float]:
    """Return the errors of the loss and of each gradient against torch's."""
    mesh = context.mesh(tp=context.world)
    comm = Communicator(mesh)
    part, shards = cut_model(CONFIG, torch.float64, comm, sequence=sequence)
    theirs: nn.Module = whole_model(CONFIG, torch.float64)
    parallelize_module(theirs, mesh["tp"], torchs_plan(sequence))
    loss, their_loss = part(*batch_of(CONFIG)), theirs(*batch_of(CONFIG))
    loss.backward()
    their_loss.backward()
    errors = {"loss": abs(float(loss / whole(their_loss)) - 1)}
    named = dict(part.named_parameters())
    for name, parameter in theirs.named_parameters():
        wanted = block_of(whole(parameter.grad), shards.get(name))
        errors[name] = float((named[name].grad - wanted).abs().max() / wanted.abs().max())
    comm.close()
    assert any(isinstance(p, DTensor) for p in theirs.parameters())
    return errors


@pytest.mark.parametrize("sequence", [False, True])
def test_loss_and_gradients_are_those_of_dtensor(ranks: Pools, sequence: bool) -> None:
    for errors in ranks(4)(errors_beside_torch, sequence):
        assert max(errors.values()) <= 1e-9, errors
