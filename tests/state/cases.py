"""Layouts to save at and to load at, a small model that all of them can hold, and what it holds."""

import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.config.model import Flavour, ModelConfig
from rayzero.dist.comm import Communicator
from rayzero.engine import OffloadOptions, PrecisionOptions, ZeroEngine, ZeroOptions
from rayzero.engine.whole import full_tensors
from rayzero.models.init import Initializer
from rayzero.models.transformer import Transformer
from rayzero.parallel.apply import apply
from rayzero.parallel.plans import transformer_plan
from rayzero.parallel.start import draw_local
from rayzero.records import Where
from tests.engine.reference import two_groups
from tests.ranks import RankContext

LR = 0.01
ADAMW = partial(torch.optim.AdamW, lr=LR, weight_decay=0.01, fused=True)
SGD = partial(torch.optim.SGD, lr=LR, momentum=0.9)
MODEL = ModelConfig(
    hidden=20, num_layers=1, num_heads=4, ffn_hidden=28, vocab_size=27, max_seq_len=8
)
"""No size is a power of two, so shard borders fall anywhere."""

UNTIED = replace(MODEL, tied_output=False, flavour=Flavour.LLAMA)
GLOBAL_BATCH = 12


@dataclass(frozen=True)
class Layout:
    """How an engine is laid out over ranks."""

    stage: int
    world: int
    tp: int = 1
    replicate: int = 1
    params: str = "fp32"
    offload: str = "none"
    offload_params: str = "none"


FP32 = PrecisionOptions()


def precision_of(layout: Layout) -> PrecisionOptions:
    """Return fp32 throughout, or narrow parameters with an fp32 master."""
    return FP32 if layout.params == "fp32" else PrecisionOptions(params=layout.params)


def offload_of(layout: Layout) -> OffloadOptions:
    """Return what the layout keeps away from the device."""
    return OffloadOptions(
        optimizer=layout.offload, params=layout.offload_params, folder=tempfile.gettempdir()
    )


def transformer_engine(
    ctx: RankContext, layout: Layout, config: ModelConfig = MODEL, *, seed: int = 0
) -> ZeroEngine:
    """Build the transformer on meta and cut it as the layout says."""
    comm = Communicator(ctx.mesh(tp=layout.tp, replicate=layout.replicate))
    with torch.device("meta"):
        module = Transformer(config)
    table = apply(module, transformer_plan(config), comm)
    return ZeroEngine(
        module,
        optimizer=ADAMW,
        param_groups=two_groups,
        zero=ZeroOptions(stage=layout.stage, bucket_elements=2000),
        precision=precision_of(layout),
        mesh=comm,
        offload=offload_of(layout),
        tensor_parallel=table,
        initialize=partial(draw_local, Initializer(config, seed)),
    )


def plain_engine(
    ctx: RankContext, layout: Layout, module: nn.Module, optimizer: Any = ADAMW
) -> ZeroEngine:
    """Put an engine around any module."""
    return ZeroEngine(
        module,
        optimizer=optimizer,
        param_groups=two_groups,
        zero=ZeroOptions(stage=layout.stage, bucket_elements=100),
        precision=precision_of(layout),
        offload=offload_of(layout),
        mesh=Communicator(ctx.mesh(replicate=layout.replicate)),
    )


def train(engine: ZeroEngine, first: int, num_steps: int) -> None:
    """Train on steps first, first + 1, ... of the same global batches at any layout."""
    comm = engine.comm
    ranks = comm.size("replicate") * comm.size("shard")
    mine = comm.rank("replicate") * comm.size("shard") + comm.rank("shard")
    for step in range(first, first + num_steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(MODEL.vocab_size, (GLOBAL_BATCH, 9), generator=generator)
        own = tokens.chunk(ranks)[mine]
        engine.backward(engine(own[:, :-1], own[:, 1:]))
        engine.step()


def named_state(engine: ZeroEngine) -> dict[str, Tensor]:
    """Gather weights, what the optimizer updates and each moment, whole and by name, on all ranks.

    Goes by the engine's own gather, not by anything that checkpoints are made of.
    """
    parts = engine._parts
    state = {f"weights/{k}": v for k, v in engine.full_state_dict(all_ranks=True).items()}
    for flat in parts.trained:
        if parts.optimizer.where(flat) is Where.DISK:
            parts.optimizer.bring(flat)
        for kind, tensor in parts.optimizer.tensors(flat).items():
            whole = full_tensors([(flat, tensor)], parts.comm, keep=True)
            state |= {f"{kind}/{name}": tensor for name, tensor in whole.items()}
    return state


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Name what is not bit-equal."""
    names = sorted(a.keys() | b.keys())
    return [n for n in names if n not in a or n not in b or not torch.equal(a[n], b[n])]


def save_and_go_on(
    ctx: RankContext, layout: Layout, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Train 2 steps, save, train 3 more, and the same 3 after loading into another engine."""
    with transformer_engine(ctx, layout) as engine:
        train(engine, 0, 2)
        engine.save(folder, {"rank": ctx.rank})
        saved = named_state(engine)
        train(engine, 2, 3)
        final = named_state(engine)
    with transformer_engine(ctx, layout, seed=1) as other:
        assert other.load(folder) == {"rank": ctx.rank}
        wrong = differences(saved, named_state(other))
        train(other, 2, 3)
        wrong += differences(final, named_state(other))
    return (saved, final, wrong) if ctx.rank == 0 else ({}, {}, wrong)


def load_and_go_on(
    ctx: RankContext, layout: Layout, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load into an engine with other weights and train 3 steps; return both states."""
    with transformer_engine(ctx, layout, seed=1) as engine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if layout.params != "fp32" else "error")
            engine.load(folder)
        loaded = named_state(engine)
        train(engine, 2, 3)
        trained = named_state(engine)
    return (loaded, trained) if ctx.rank == 0 else ({}, {})
