"""REF: one plain torch process that sees every rank's micro-batches; and small models to train."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayzero.engine import PrecisionOptions, ZeroEngine, ZeroOptions
from tests.ranks import RankContext


class Block(nn.Module):
    """A residual block with a norm, as transformers have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, repeated blocks, tied output: every kind of unit at once."""

    def __init__(self, width: int = 6, blocks: int = 3, vocab: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build Net with fixed weights."""
    torch.manual_seed(3)
    return Net().to(dtype)


def net_batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return micro-batch `index` of a global step; 2 sequences of 4 tokens."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, 11, (2, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def two_groups(named: Any) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not and learn slower."""
    named = list(named)
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.003},
    ]


@dataclass(frozen=True)
class Case:
    """One way to train; equal cases must give equal weights."""

    steps: int = 5
    accumulation: int = 1
    max_grad_norm: float | None = None
    optimizer: str = "adamw"
    dtype: str = "fp32"
    groups: bool = True
    last_only: bool = True


ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.01, fused=True)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": ADAMW, "sgd": SGD}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def train_plain(
    world: int,
    case: Case,
    make: Callable[[torch.dtype], nn.Module] = make_net,
    batch: Callable[[int, int], Sequence[torch.Tensor]] = net_batch,
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Train in this process on the mean over all micro-batches; return weights, losses, norms."""
    module = make(DTYPES[case.dtype])
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    groups = two_groups(named) if case.groups else [{"params": [p for _, p in named]}]
    optimizer = OPTIMIZERS[case.optimizer](groups)
    losses, norms = [], []
    for step in range(case.steps):
        total = torch.zeros((), dtype=torch.float64)
        for index in range(world * case.accumulation):
            loss = module(*batch(step, index)) / (world * case.accumulation)
            loss.backward()
            total += loss.detach().double()
        for _, parameter in named:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.stack([p.grad.double().square().sum() for _, p in named]).sum().sqrt()
        norms.append(float(norm))
        if case.max_grad_norm is not None and norm > case.max_grad_norm:
            for _, parameter in named:
                parameter.grad.mul_(case.max_grad_norm / norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return {k: v.detach().clone() for k, v in module.state_dict().items()}, losses, norms


def train_engine(
    ctx: RankContext,
    case: Case,
    zero: ZeroOptions,
    precision: PrecisionOptions | None = None,
    make: Callable[[torch.dtype], nn.Module] = make_net,
    batch: Callable[[int, int], Sequence[torch.Tensor]] = net_batch,
) -> dict[str, Any]:
    """Train on all ranks; return this rank's full weights and norms, and the rank's own ledger."""
    torch.manual_seed(3 + ctx.rank)
    with ZeroEngine(
        make(DTYPES[case.dtype]),
        optimizer=OPTIMIZERS[case.optimizer],
        param_groups=two_groups if case.groups else None,
        zero=zero,
        precision=precision or PrecisionOptions(),
        mesh=ctx.mesh(),
        max_grad_norm=case.max_grad_norm,
    ) as engine:
        norms, losses = [], []
        for step in range(case.steps):
            for micro in range(case.accumulation):
                loss = engine(*batch(step, micro * ctx.world + ctx.rank))
                losses.append(float(loss.detach()))
                last = not case.last_only or micro == case.accumulation - 1
                engine.backward(loss, last=last)
            norms.append(engine.step().grad_norm)
        return {
            "weights": engine.full_state_dict(all_ranks=True),
            "norms": norms,
            "losses": losses,
            "transfers": engine.ledger.transfers,
            "holdings": engine.holdings(),
        }


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two state dicts with the same names."""
    assert a.keys() == b.keys()
    return max(
        (float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel()), default=0.0
    )


def bit_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts agree in every bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
