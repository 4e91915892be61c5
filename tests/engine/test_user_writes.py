"""What users write into parameters between steps is trained on, or refused: never dropped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rayzero.engine import OffloadOptions, PrecisionOptions, ZeroEngine, ZeroOptions
from tests.engine.harness import error_of
from tests.engine.reference import ADAMW, bit_equal, make_net, net_batch, two_groups
from tests.ranks import Pools, RankContext

Write = Callable[[ZeroEngine], None]


def gathered(engine: ZeroEngine) -> None:
    with engine.gathered(engine.module, writer_rank=0), torch.no_grad():
        halve(engine.module)


def assigned(engine: ZeroEngine) -> None:
    with engine.gathered(engine.module, writer_rank=0), torch.no_grad():
        halve(engine.module)
        for parameter in engine.module.parameters():
            parameter.data = parameter.data.clone()


def in_place(engine: ZeroEngine) -> None:
    with torch.no_grad():
        halve(engine.module)


def through_data(engine: ZeroEngine) -> None:
    for parameter in engine.module.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(0.5)
    engine.module.norm.bias.data[1] = 7.0  # type: ignore[index, operator, union-attr]


def halve(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.mul_(0.5)
    module.norm.bias[1] = 7.0  # type: ignore[index, operator]


def written(
    ctx: RankContext, write: Write, zero: ZeroOptions, params: str, offload: OffloadOptions
) -> dict[str, torch.Tensor]:
    """Write before the first step and between two others."""
    with ZeroEngine(
        make_net(),
        optimizer=ADAMW,
        param_groups=two_groups,
        zero=zero,
        precision=PrecisionOptions(params=params),
        offload=offload,
        mesh=ctx.mesh(),
    ) as engine:
        for step in range(3):
            if step != 1:
                write(engine)
            engine.backward(engine(*net_batch(step, ctx.rank)))
            engine.step()
        return engine.full_state_dict(all_ranks=True)


@pytest.mark.parametrize(
    ("params", "states"), [("fp32", "none"), ("bf16", "none"), ("fp32", "host"), ("bf16", "disk")]
)
def test_what_is_written_into_whole_parameters_reaches_the_master(
    ranks: Pools, tmp_path: Any, params: str, states: str
) -> None:
    offload = OffloadOptions(optimizer=states, folder=str(tmp_path))
    plain = ranks(2)(written, nothing, ZeroOptions(stage=0), params, offload)[0]
    for zero in (
        *(ZeroOptions(stage=stage, bucket_elements=150) for stage in range(3)),
        ZeroOptions(stage=3, persistence_elements=10**6),
    ):
        expected = ranks(2)(written, gathered, zero, params, offload)[0]
        assert not bit_equal(expected, plain)
        for write in (assigned, in_place, through_data):
            assert bit_equal(ranks(2)(written, write, zero, params, offload)[0], expected), zero


def nothing(engine: ZeroEngine) -> None:
    """Leave the weights alone."""


class Codebook(nn.Module):
    """Entries that its forward moves towards what they are used for, as vector quantisers do."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.entries.mul_(0.5)
        return self.mix(x @ self.entries).square().mean()


def quantize(ctx: RankContext, zero: ZeroOptions) -> tuple[str, float]:
    """Train a step; return its error, and an entry."""
    module = Codebook()
    with ZeroEngine(module, optimizer=ADAMW, zero=zero, mesh=ctx.mesh()) as engine:
        error = error_of(lambda: engine.backward(engine(torch.ones(2, 4))))
        with engine.gathered(module):
            return error, float(module.entries[0, 0])


def test_what_a_forward_writes_is_kept_where_weights_are_whole_and_refused_where_not(
    ranks: Pools,
) -> None:
    for stage in range(3):
        assert ranks(2)(quantize, ZeroOptions(stage=stage)) == [("", 0.5)] * 2
    kept = ZeroOptions(stage=3, persistence_elements=16)
    assert ranks(2)(quantize, kept) == [("", 0.5)] * 2
    for error, entry in ranks(2)(quantize, ZeroOptions(stage=3)):
        assert error.startswith("EngineError")
        assert "'entries' was written to" in error
        assert entry == 1.0


def moved(ctx: RankContext, zero: ZeroOptions, move: Write) -> str:
    with ZeroEngine(make_net(), optimizer=ADAMW, zero=zero, mesh=ctx.mesh()) as engine:
        for _ in range(2):
            error = error_of(lambda: move(engine))
            if error:
                return error
            engine.backward(engine(*net_batch(0, ctx.rank)))
            error = error_of(engine.step)
            if error:
                return error
        return ""


def given(engine: ZeroEngine) -> None:
    weight: Any = engine.module.norm.weight  # type: ignore[union-attr]
    weight.data = torch.ones(6)


def converted(engine: ZeroEngine) -> None:
    engine.module.bfloat16().float()


@pytest.mark.parametrize("move", [given, converted])
def test_a_parameter_that_is_given_other_memory_is_refused_by_name(
    ranks: Pools, move: Write
) -> None:
    for stage in range(4):
        for error in ranks(2)(moved, ZeroOptions(stage=stage), move):
            assert error.startswith("ShardedParameterError" if stage == 3 else "EngineError")
            assert "norm.weight" in error or move is converted
            assert "parameter" in error
