"""A module with everything that is easily forgotten: frozen weights, buffers, ties, odd dtypes."""

from functools import partial

import torch
from torch import Tensor, nn

from rayzero.engine import ZeroEngine
from tests.ranks import RankContext
from tests.state.cases import ADAMW, Layout, plain_engine


class Mixed(nn.Module):
    """Frozen and trained layers, batch norm, a tied pair, a table that is no part of the state."""

    table: Tensor

    def __init__(self, seed: int, *, tied: bool = True, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(11, width)
        self.frozen = nn.Linear(width, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.back = nn.Linear(5, width)
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a loss."""
        dtype = self.back.weight.dtype
        x = self.frozen(self.tokens(tokens) + self.table.to(dtype))
        x = self.back(self.norm(x.float()).to(dtype))
        logits: Tensor = self.head(x * self.scale)
        return logits.float().square().mean()


def mixed_engine(ctx: RankContext, layout: Layout, seed: int, *, tied: bool = True) -> ZeroEngine:
    """Put an engine around it, trained for two steps."""
    engine = plain_engine(ctx, layout, Mixed(seed, tied=tied), ADAMW)
    step(engine, 0)
    step(engine, 1)
    return engine


def step(engine: ZeroEngine, index: int) -> None:
    """Train one step, on tokens of this rank's own."""
    generator = torch.Generator().manual_seed(100 * index + engine.comm.rank("shard"))
    engine.backward(engine(torch.randint(0, 11, (6,), generator=generator)))
    engine.step()


OTHER_OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
