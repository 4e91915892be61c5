"""Column-cut linears share a transfer where they read the same tensor, and nowhere else."""

import gc
import weakref

import torch
from torch import Tensor, nn

from rayzero.config.parallel import Style
from rayzero.dist.comm import Communicator
from rayzero.parallel.apply import apply
from tests.ranks import Pools, RankContext


class Pair(nn.Module):
    """Two linears with one parent: of one tensor, or of two."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a, self.b = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        for linear in (self.a, self.b):
            linear.weight.data = torch.randn(6, 4, generator=generator)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x).square().sum() + self.b(y).exp().sum()


def transfers_and_errors(context: RankContext, same: bool) -> tuple[int, float]:
    """Return the number of all-reduces in backward and the largest error of inputs' gradients."""
    comm = Communicator(context.mesh(tp=context.world))
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(2, 4, generator=generator)
    found = []
    for is_cut in (False, True):
        pair, x = Pair(), values[0].clone().requires_grad_()
        y = x if same else values[1].clone().requires_grad_()
        if is_cut:
            apply(nn.ModuleDict({"pair": pair}), {"pair.?": Style.COLUMN}, comm)
        comm.ledger.begin_window()
        pair(x, y).backward()
        found.append((x.grad, y.grad))
    count = len(comm.ledger.transfers)
    comm.close()
    (x, y), (cut_x, cut_y) = found
    return count, max(float((cut_x - x).abs().max()), float((cut_y - y).abs().max()))


def test_one_tensor_is_entered_once_and_two_twice(ranks: Pools) -> None:
    for same, expected in ((True, 1), (False, 2)):
        for count, error in ranks(2)(transfers_and_errors, same):
            assert count == expected
            assert error <= 1e-5


def is_kept_alive(context: RankContext) -> bool:
    """Whether what the linears read is left when nobody holds it."""
    comm = Communicator(context.mesh(tp=context.world))
    pair, seen = Pair(), []
    apply(nn.ModuleDict({"pair": pair}), {"pair.?": Style.COLUMN}, comm)
    pair.b.register_forward_hook(lambda _, args, __: seen.append(weakref.ref(args[0])))
    with torch.no_grad():
        pair(*[torch.ones(4)] * 2)
    gc.collect()
    comm.close()
    (entered,) = seen
    return entered() is not None


def test_an_entry_keeps_no_activation_alive(ranks: Pools) -> None:
    assert not any(ranks(2)(is_kept_alive))
