"""T07: masks are alike on what tp ranks hold alike, and nobody else's anywhere else."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayzero.config.model import Checkpointing
from rayzero.dist.comm import Communicator
from rayzero.parallel.apply import apply
from rayzero.parallel.plan import Style
from rayzero.train.rng import reseed
from tests.ranks import Pools, RankContext
from tests.tp.cases import MODELS, batch_of, cut, cut_model, whole_model

TP, DP = 2, 2


def masks(context: RankContext, sequence: bool) -> dict[str, Tensor]:
    """Return the masks of ten forwards, each seen again in recomputation, and the last state."""
    comm = Communicator(context.mesh(tp=TP))
    reseed(3, 0, data_rank=comm.rank("shard"))
    module = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5))
    apply(module, {"1": Style.COLUMN, "2": Style.SEQUENCE}, comm, sequence=sequence)
    seen: dict[str, list[Tensor]] = {name: [] for name in "012"}

    def record(name: str) -> Callable[..., None]:
        return lambda _, __, output: seen[name].append(output.detach() != 0)

    for name, dropout in module.named_children():
        dropout.register_forward_hook(record(name))
    for _ in range(10):
        x = torch.ones(64, requires_grad=True)

        def all_masks(x: Tensor) -> Tensor:
            return sum(dropout(x).exp() for dropout in module)  # type: ignore[return-value]

        checkpoint(all_masks, x, use_reentrant=False).sum().backward()
        if context.rank % TP == 0:
            module.eval()(x)  # draws nothing, so peers stay in step
            module.train()
            for found in seen.values():
                found.pop()
    comm.close()
    for found in seen.values():
        assert len(found) == 20
        for forward, again in zip(found[0::2], found[1::2], strict=True):
            assert torch.equal(forward, again)
    return {name: torch.stack(found) for name, found in seen.items()} | {"s": torch.get_rng_state()}


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_agree_inside_a_tp_group_on_what_all_hold_and_differ_elsewhere(
    ranks: Pools, sequence: bool
) -> None:
    by_rank = ranks(TP * DP)(masks, sequence)
    for name, is_shared in (("0", True), ("1", False), ("2", not sequence), ("s", True)):
        for first in (0, 2):
            same = torch.equal(by_rank[first][name], by_rank[first + 1][name])
            assert same == is_shared, name
        assert not torch.equal(by_rank[0][name], by_rank[2][name]), name
        assert not torch.equal(by_rank[1][name], by_rank[3][name]), name
    for found in by_rank:
        kept = [float(found[name].float().mean()) for name in "012"]
        assert all(abs(k - 0.5) < 0.1 for k in kept)
        assert not torch.equal(found["0"], found["1"])


def losses(context: RankContext, sequence: bool) -> dict[str, tuple[float, float]]:
    """Return the loss and the gradients' sum of squares for each checkpointing mode."""
    comm = Communicator(context.mesh(tp=context.world))
    found = {}
    for mode in Checkpointing:
        config = replace(MODELS["gpt2 tied"], dropout=0.2, checkpointing=mode)
        part, _ = cut_model(config, torch.float64, comm, sequence=sequence)
        torch.manual_seed(11)
        loss = part(*batch_of(config))
        loss.backward()
        squares = sum(float(p.grad.square().sum()) for p in part.parameters())
        found[mode.value] = (loss.item(), squares)
    comm.close()
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputation_draws_the_same_masks(ranks: Pools, sequence: bool) -> None:
    for found in ranks(2)(losses, sequence):
        assert found["none"] == found["full"] == found["selective"]


def loss_beside_one_process(context: RankContext) -> tuple[float, float]:
    """Return the loss of the cut and of the whole model, with dropout on whole activations."""
    comm = Communicator(context.mesh(tp=context.world))
    config = replace(MODELS["gpt2 tied"], dropout=0.2)
    found = []
    for is_cut in (True, False):
        model = whole_model(config, torch.float64)
        for block in model.blocks:
            block.attention.core.p = 0.0
        if is_cut:
            cut(model, config, comm)
        torch.manual_seed(11)
        found.append(model(*batch_of(config)).item())
    comm.close()
    return found[0], found[1]


def test_masks_of_whole_activations_are_those_of_one_process(ranks: Pools) -> None:
    for ours, whole in ranks(2)(loss_beside_one_process):
        assert ours == pytest.approx(whole, rel=1e-12)
