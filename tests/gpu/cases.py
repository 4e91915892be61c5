"""A small net trained on a rank's device, and theory's question about its engine."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rayzero.config.precision import Dtype, PrecisionConfig
from rayzero.config.zero import OffloadConfig, Place
from rayzero.engine import OffloadOptions, PrecisionOptions, ZeroEngine, ZeroOptions
from rayzero.theory.question import OptimizerShape, Question
from tests.engine.harness import ADAMW
from tests.ranks import RankContext

WIDTH = 64


class Stack(nn.Module):
    """Repeated linears; matrix products alone, which give the same bits each time."""

    def __init__(self, width: int = WIDTH, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def stack_engine(
    ctx: RankContext,
    zero: ZeroOptions,
    offload: OffloadOptions | None = None,
    params: str = "fp32",
    module: nn.Module | None = None,
) -> ZeroEngine:
    """Put an engine around a stack, which starts on the host."""
    torch.manual_seed(3)
    return ZeroEngine(
        module or Stack(),
        optimizer=ADAMW,
        zero=zero,
        offload=offload or OffloadOptions(),
        precision=PrecisionOptions(params=params),
        mesh=ctx.mesh(),
        max_grad_norm=0.5,
    )


def batch(ctx: RankContext, step: int, params: str = "fp32", width: int = WIDTH) -> torch.Tensor:
    """Return a rank's input of a step on its device."""
    generator = torch.Generator().manual_seed(100 * step + ctx.rank)
    x = torch.randn(8, width, generator=generator)
    return x.to(ctx.device, torch.bfloat16 if params == "bf16" else torch.float32)


def lag(ctx: RankContext) -> None:
    """Keep a CUDA device busy for some ten milliseconds, so that the host runs ahead of it."""
    if ctx.device == "cuda":
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]


def train(engine: ZeroEngine, ctx: RankContext, *, lags: bool = False, **data: Any) -> None:
    """Train three steps of two micro-batches."""
    for step in range(3):
        for micro in range(2):
            loss = engine(batch(ctx, 2 * step + micro, **data))
            if lags:
                lag(ctx)
            engine.backward(loss, last=micro == 1)
        if lags:
            lag(ctx)
        engine.step()


def question_of(
    engine: ZeroEngine, zero: ZeroOptions, offload: OffloadOptions, params: str
) -> Question:
    """Ask theory about this rank."""
    return Question(
        stage=zero.stage,
        layouts=engine.layouts,
        shard_index=engine.shard_index,
        precision=PrecisionConfig(params=Dtype(params)),
        optimizer=OptimizerShape(moments=2, counters=1),
        offload=OffloadConfig(
            optimizer=Place(offload.optimizer),
            params=Place(offload.params),
            folder=offload.folder,
            fraction=offload.fraction,
        ),
        overlap=zero.overlap,
        carrier=engine.carrier,
        uses=tuple(engine.unit_uses.items()),
    )


def places(folder: Path) -> list[OffloadOptions]:
    """List where states and parameters may live at stage 3, the device first."""
    return [
        OffloadOptions(optimizer=optimizer, params=params, folder=str(folder))
        for optimizer, params in (
            ("none", "none"),
            ("host", "none"),
            ("host", "host"),
            ("none", "host"),
            ("disk", "none"),
            ("none", "disk"),
            ("host", "disk"),
            ("disk", "disk"),
        )
    ]
