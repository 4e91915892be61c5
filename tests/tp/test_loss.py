"""Cross-entropy over a split vocabulary equals torch's over the whole one."""

import torch
import torch.nn.functional as F

from rayzero.dist.comm import Communicator
from rayzero.parallel.loss import VocabCrossEntropy
from tests.ranks import Pools, RankContext


def compare(context: RankContext, scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the errors of loss and gradient for logits of this size, one target ignored."""
    generator = torch.Generator().manual_seed(1)
    whole = (scale * torch.randn(2, 5, 8, generator=generator)).to(dtype).requires_grad_()
    targets = torch.tensor([[0, 7, 3, -100, 4], [1, 6, 2, 5, 0]])
    exact = whole.to(torch.promote_types(dtype, torch.float32))
    expected = F.cross_entropy(exact.flatten(0, 1), targets.flatten())
    (3.0 * expected).backward()

    comm = Communicator(context.mesh(tp=context.world))
    part = whole.detach().chunk(context.world, -1)[context.rank].clone().requires_grad_()
    loss = VocabCrossEntropy(comm, "loss")(part, targets)
    (3.0 * loss).backward()
    comm.close()
    wanted = whole.grad.chunk(context.world, -1)[context.rank]
    return abs((loss - expected).item()), float((part.grad - wanted).abs().max())


def test_loss_and_gradient_equal_those_over_the_whole_vocabulary(ranks: Pools) -> None:
    for world in (2, 4):
        for loss_error, gradient_error in ranks(world)(compare, 1.0, torch.float64):
            assert loss_error <= 1e-12
            assert gradient_error <= 1e-12


def test_large_logits_do_not_overflow(ranks: Pools) -> None:
    for loss_error, gradient_error in ranks(2)(compare, 1e4, torch.float32):
        assert loss_error <= 1e-2  # of a loss near 1e4
        assert gradient_error <= 1e-6


def test_bf16_logits_are_reduced_in_fp32(ranks: Pools) -> None:
    for loss_error, gradient_error in ranks(2)(compare, 1.0, torch.bfloat16):
        assert loss_error <= 1e-6
        assert gradient_error <= 1e-3  # the gradient itself is rounded to bf16
