"""Column-cut linears share transfers where they read the same tensor, and nowhere else."""

import gc
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayzero.config.parallel import Style
from rayzero.dist.comm import Communicator
from rayzero.dist.observed import Links
from rayzero.parallel.apply import apply
from tests.ranks import Pools, RankContext
from tests.tp.busy import COMPUTE_S, BusyMatmul

TOKENS, WIDTH = 6, 4
LATENCY_S = COMPUTE_S / 2


class Pair(nn.Module):
    """Two linears with one parent, of one tensor or of two; the first is also read beside them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a, self.b = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        return self.a(x).square().sum() + self.b(y).exp().sum() + 3 * x.sum()


def cut(pair: Pair, comm: Communicator, *, sequence: bool = False, overlap: bool = True) -> Pair:
    """Cut both linears' outputs."""
    plan = {"pair.?": Style.COLUMN}
    apply(nn.ModuleDict({"pair": pair}), plan, comm, sequence=sequence, overlap=overlap)
    return pair


def inputs(comm: Communicator, *, sequence: bool = False) -> tuple[Tensor, Tensor]:
    """Return what this rank has of two inputs that need gradients."""
    generator = torch.Generator().manual_seed(4)
    wholes = torch.randn(2, TOKENS, WIDTH, generator=generator)
    own = wholes.chunk(comm.size("tp"), dim=1)[comm.rank("tp")] if sequence else wholes
    x, y = (one.clone().requires_grad_() for one in own)
    return x, y


def transfers_and_errors(
    context: RankContext, same: bool, sequence: bool
) -> tuple[Counter, dict[str, float]]:
    """Return (op, unit) of the transfers and the largest errors of all gradients."""
    comm = Communicator(context.mesh(tp=context.world))
    whole, part = Pair(), cut(Pair(), comm, sequence=sequence)
    x, y = inputs(comm)
    own_x, own_y = inputs(comm, sequence=sequence)
    whole(x, None if same else y).backward()
    comm.ledger.begin_window()
    part(own_x, None if same else own_y).backward()
    found = Counter((t.op, t.unit) for t in comm.ledger.transfers)
    pairs = [("x", own_x.grad, x.grad)] + ([] if same else [("y", own_y.grad, y.grad)])
    wholes = dict(whole.named_parameters())
    errors = {}
    for name, parameter in part.named_parameters():
        block = wholes[name].grad.chunk(2)[comm.rank("tp")]
        errors[name] = float((parameter.grad - block).abs().max())
    for name, got, wanted in pairs:
        block = wanted.chunk(2)[comm.rank("tp")] if sequence else wanted
        errors[name] = float((got - block).abs().max())
    comm.close()
    return found, errors


@pytest.mark.parametrize("sequence", [False, True])
def test_one_tensor_is_entered_once_and_two_twice(ranks: Pools, sequence: bool) -> None:
    once = [("all_reduce", "pair")]
    if sequence:
        once = [("all_gather", "pair"), ("reduce_scatter", "pair"), ("all_gather", "pair.again")]
    for same, times in ((True, 1), (False, 2)):
        for found, errors in ranks(2)(transfers_and_errors, same, sequence):
            assert found == Counter(dict.fromkeys(once, times))
            assert max(errors.values()) <= 1e-4, errors


def wholes_left(context: RankContext) -> int:
    """Count tensors with all tokens that are alive when the linears have run."""
    comm = Communicator(context.mesh(tp=context.world))
    pair, (x, _) = cut(Pair(), comm, sequence=True), inputs(comm, sequence=True)
    loss = pair(x)
    gc.collect()
    shapes = [tuple(t.shape) for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    comm.close()
    assert (TOKENS // 2, WIDTH) in shapes
    assert loss.requires_grad
    return shapes.count((TOKENS, WIDTH))


def test_an_entry_keeps_no_gathered_activation_alive(ranks: Pools) -> None:
    assert ranks(2)(wholes_left) == [0, 0]


def every_way(context: RankContext, sequence: bool) -> dict[str, list[bytes]]:
    """Return all gradients' bytes by way of going through forward and backward."""
    comm = Communicator(context.mesh(tp=context.world))
    found = {}
    for way in ("plain", "one by one", "twice", "in parts", "reentrant", "not reentrant"):
        pair = cut(Pair(), comm, sequence=sequence, overlap=way != "one by one")
        x, _ = inputs(comm, sequence=sequence)
        if way.endswith("reentrant"):
            loss = checkpoint(pair, x, use_reentrant=way == "reentrant")
        else:
            loss = pair(x)
        if way == "in parts":
            torch.autograd.grad(loss, [pair.b.weight], retain_graph=True)
            torch.autograd.grad(loss, [x], retain_graph=True)
        if way == "twice":
            loss.backward(retain_graph=True)
            for tensor in (x, *pair.parameters()):
                tensor.grad = None
        loss.backward()
        found[way] = [t.grad.numpy().tobytes() for t in (x, *pair.parameters())]
    comm.close()
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_are_bit_equal_in_whatever_way_backward_runs(
    ranks: Pools, sequence: bool
) -> None:
    for found in ranks(2)(every_way, sequence):
        assert all(gradients == found["plain"] for gradients in found.values())


def with_frozen(context: RankContext, frozen: str) -> tuple[Counter, bool]:
    """Return the ops of a backward, and whether what is not frozen has its usual gradient."""
    comm = Communicator(context.mesh(tp=context.world))
    wanted: dict[str, Tensor] = {}
    for is_frozen in (False, True):
        pair, (x, _) = cut(Pair(), comm, sequence=True), inputs(comm, sequence=True)
        tensors = {"x": x, **dict(pair.named_parameters())}
        for name, tensor in tensors.items():
            tensor.requires_grad_(not is_frozen or not name.endswith(frozen))
        loss = pair(x)
        comm.ledger.begin_window()
        loss.backward()
        got = {name: t.grad for name, t in tensors.items() if t.grad is not None}
        wanted = wanted or got
    ops = Counter(t.op for t in comm.ledger.transfers)
    comm.close()
    assert got.keys() == {name for name in tensors if not name.endswith(frozen)}
    return ops, all(torch.equal(wanted[name], grad) for name, grad in got.items())


def test_what_is_frozen_sends_nothing(ranks: Pools) -> None:
    for frozen, sent in (("x", "all_gather"), ("weight", "reduce_scatter")):
        for ops, is_equal in ranks(2)(with_frozen, frozen):
            assert ops == Counter({sent: 1})
            assert is_equal


def under_autocast(context: RankContext) -> list[torch.dtype]:
    """Return the dtypes of the result and of all gradients."""
    comm = Communicator(context.mesh(tp=context.world))
    pair, (x, _) = cut(Pair(), comm, sequence=True), inputs(comm, sequence=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = pair.a(x)
    y.float().square().sum().backward()
    comm.close()
    return [y.dtype, x.grad.dtype, pair.a.weight.grad.dtype, pair.a.bias.grad.dtype]


def test_a_linear_computes_in_the_dtype_of_autocast(ranks: Pools) -> None:
    for dtypes in ranks(2)(under_autocast):
        assert dtypes == [torch.bfloat16, *[torch.float32] * 3]


def exposed_share(context: RankContext, sequence: bool, overlap: bool) -> float:
    """Return which share of its transfers' latency a backward has waited for."""
    links = Links(LATENCY_S)
    comm = Communicator(context.mesh(tp=context.world), transport=links)
    pair = cut(Pair(), comm, sequence=sequence, overlap=overlap)
    x, _ = inputs(comm, sequence=sequence)
    loss = pair(x)
    comm.ledger.begin_window()
    before_s = links.exposed_s
    with BusyMatmul():
        loss.backward()
    share = (links.exposed_s - before_s) / (len(comm.ledger.transfers) * LATENCY_S)
    comm.close()
    return share


@pytest.mark.parametrize("sequence", [False, True])
def test_matmuls_in_backward_hide_the_latency_of_transfers(ranks: Pools, sequence: bool) -> None:
    """The input's gradient hides that it is gathered again; the weights', the sum over ranks."""
    for share in ranks(2)(exposed_share, sequence, False):
        assert share > 0.9
    for share in ranks(2)(exposed_share, sequence, True):
        assert share < 0.1
