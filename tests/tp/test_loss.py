"""Cross-entropy over a split vocabulary equals torch's over the whole one."""

import pytest
import torch
import torch.nn.functional as F

from rayzero.dist.comm import Communicator
from rayzero.parallel.loss import VocabCrossEntropy
from tests.ranks import Pools, RankContext

PADDING = 1e6
"""What padded columns hold: any use of it shows."""


def compare(
    context: RankContext, scale: float, dtype: torch.dtype, size: int = 8, smoothing: float = 0.0
) -> tuple[float, float]:
    """Return the errors of loss and gradient for logits of this size, one target ignored."""
    generator = torch.Generator().manual_seed(1)
    whole = (scale * torch.randn(2, 5, size, generator=generator)).to(dtype).requires_grad_()
    targets = torch.tensor([[0, 7, 3, -100, 4], [1, 6, 2, 5, 0]])
    targets = torch.where(targets < 0, targets, targets % size)
    exact = whole.to(torch.promote_types(dtype, torch.float32))
    expected = F.cross_entropy(exact.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
    (3.0 * expected).backward()

    comm = Communicator(context.mesh(tp=context.world))
    padding = -size % context.world
    padded = F.pad(whole.detach(), (0, padding), value=PADDING)
    part = padded.chunk(context.world, -1)[context.rank].clone().requires_grad_()
    loss = VocabCrossEntropy(comm, "loss", vocab_size=size, label_smoothing=smoothing)
    value = loss(part, targets)
    (3.0 * value).backward()
    plain = loss.eval()(part, targets).item()
    comm.close()
    assert plain == pytest.approx(F.cross_entropy(exact.flatten(0, 1), targets.flatten()).item())
    wanted = F.pad(whole.grad, (0, padding)).chunk(context.world, -1)[context.rank]
    return abs((value - expected).item()), float((part.grad - wanted).abs().max())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [8, 7, 5])
def test_loss_and_gradient_equal_those_over_the_whole_vocabulary(
    ranks: Pools, size: int, smoothing: float
) -> None:
    """T09. On 4 ranks, 7 tokens leave one column of padding, 5 leave a rank with nothing else."""
    for world in (2, 4):
        for errors in ranks(world)(compare, 1.0, torch.float64, size, smoothing):
            assert max(errors) <= 1e-12


@pytest.mark.parametrize("size", [8, 7])
def test_large_logits_do_not_overflow(ranks: Pools, size: int) -> None:
    for loss_error, gradient_error in ranks(2)(compare, 1e4, torch.float32, size):
        assert loss_error <= 1e-2  # of a loss near 1e4
        assert gradient_error <= 1e-6


def test_bf16_logits_are_reduced_in_fp32(ranks: Pools) -> None:
    for loss_error, gradient_error in ranks(2)(compare, 1.0, torch.bfloat16):
        assert loss_error <= 1e-6
        assert gradient_error <= 1e-3  # the gradient itself is rounded to bf16
