"""Ask theory about the engine that runs: the same rank, described without its tensors."""

import math
from collections.abc import Mapping

from torch import nn

from rayzero.baselines.peer import PeerEngine
from rayzero.config.cell import CellConfig
from rayzero.engine import ZeroEngine
from rayzero.layout.boxes import whole_shape
from rayzero.parallel.crossings import crossings_of
from rayzero.records import Carrier, Transfer, Uses
from rayzero.theory.question import (
    Question,
    counted_question_of,
    optimizer_shape,
    question_of,
)
from rayzero.theory.shapes import shape_of
from rayzero.theory.tp_traffic import plan_transfers, tp_transfers, transformer_sent_bytes
from rayzero.train.tensor_plan import plan_of


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
        tp_index=engine.comm.rank("tp"),
        tp=engine.comm.size("tp"),
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


def tp_transfers_for(
    config: CellConfig, engine: ZeroEngine, question: Question, micro_steps: int
) -> tuple[Transfer, ...]:
    """List the tp transfers of a step: by theory of our transformer, by the plan for any other."""
    if config.model.factory is None or question.tp == 1:
        return tp_transfers(config, question, micro_steps)
    plan = plan_of(config, engine.module)
    crossings = crossings_of(engine.module, plan.styles)
    return plan_transfers(crossings, config, question, micro_steps)


def tp_sent_bytes(config: CellConfig, world: int) -> int:
    """Return what rank 0 sends on the axis tp in a step of our transformer."""
    question = counted_question_of(config, world=world, rank=0, carrier=Carrier.NATIVE)
    return transformer_sent_bytes(config, question, config.batching(world).accumulation)


def _uses(found: Mapping[str, Uses]) -> dict[str, Uses]:
    return {unit: uses for unit, uses in found.items() if uses != Uses()}


def _buffers_bytes(module: nn.Module) -> int:
    return sum(b.numel() * b.itemsize for b in module.buffers())


def num_params(config: CellConfig, engine: ZeroEngine | PeerEngine) -> int:
    """Count the whole model's parameters, over all tp ranks."""
    if config.model.factory is None:
        return shape_of(config.model).num_params
    if isinstance(engine, ZeroEngine):
        slots = [slot for layout in engine.layouts for slot in layout.slots]
        return sum(math.prod(whole_shape(slot.spec)) for slot in slots)
    # DeepSpeed's stage 3 leaves empty parameters that remember their size.
    return sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
