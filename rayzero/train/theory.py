"""Ask theory about the engine that runs: the same rank, described without its tensors."""

from collections.abc import Mapping

from torch import nn

from rayzero.config.cell import CellConfig
from rayzero.engine import ZeroEngine
from rayzero.theory.question import Question, optimizer_shape, question_of
from rayzero.theory.shapes import shape_of


def question_for(config: CellConfig, engine: ZeroEngine, world: int, rank: int) -> Question:
    """For our transformer from the config alone, for any other module from its names and shapes."""
    buffers_bytes = _buffers_bytes(engine.module)
    if config.model.factory is None:
        return question_of(
            config,
            world=world,
            rank=rank,
            carrier=engine.carrier,
            buffers_bytes=buffers_bytes,
        )
    return Question(
        stage=config.zero.stage,
        layouts=engine.layouts,
        shard_index=engine.shard_index,
        replicate_index=engine.comm.rank("replicate"),
        replicate=engine.comm.size("replicate"),
        precision=config.precision,
        offload=config.offload,
        optimizer=optimizer_shape(config.optimizer),
        overlap=config.zero.overlap,
        carrier=engine.carrier,
        buffers_bytes=buffers_bytes,
        uses=tuple(_uses(engine.unit_uses).items()),
    )


def _uses(found: Mapping[str, int]) -> dict[str, int]:
    return {unit: count for unit, count in found.items() if count != 1}


def _buffers_bytes(module: nn.Module) -> int:
    return sum(b.numel() * b.itemsize for b in module.buffers())


def num_params(config: CellConfig, module: nn.Module) -> int:
    """Count the whole model's parameters, over all tp ranks."""
    if config.model.factory is None:
        return shape_of(config.model).num_params
    # DeepSpeed's stage 3 leaves empty parameters that remember their size.
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
