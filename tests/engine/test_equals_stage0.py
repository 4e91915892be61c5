"""Every stage trains what one plain torch process trains, and stages 0-3 agree bit for bit."""

import dataclasses

import pytest
import torch
from torch import nn

from rayzero.engine import ZeroEngine, ZeroOptions
from tests.engine.harness import ADAMW
from tests.engine.reference import (
    Case,
    bit_equal,
    largest_difference,
    train_engine,
    train_plain,
)
from tests.ranks import Pools, RankContext

# Bounds of REF: fp64 AdamW 1e-10, fp32 SGD 1e-6, fp32 AdamW 1% of lr x steps.
BOUNDS = {("adamw", "fp64"): 1e-10, ("sgd", "fp32"): 1e-6, ("adamw", "fp32"): 0.01 * 0.01 * 5}
CASES = {
    "adamw": Case(),
    "clip bites": Case(max_grad_norm=0.1),
    "clip does not": Case(max_grad_norm=1e3),
    "three micro-batches": Case(accumulation=3, max_grad_norm=0.5),
    "sgd": Case(optimizer="sgd", accumulation=3),
    "fp64": Case(dtype="fp64", accumulation=3, max_grad_norm=0.1),
    "one group": Case(groups=False),
}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_stage_equals_one_plain_process(ranks: Pools, world: int, name: str) -> None:
    case = CASES[name]
    weights, _, norms = train_plain(world, case)
    bound = BOUNDS[case.optimizer, case.dtype]
    first = None
    for stage in range(4):
        results = ranks(world)(train_engine, case, ZeroOptions(stage=stage, bucket_elements=150))
        for result in results:
            assert bit_equal(result["weights"], results[0]["weights"]), (
                f"stage {stage} ranks differ"
            )
            assert largest_difference(result["weights"], weights) <= bound, f"stage {stage}"
            assert result["norms"] == pytest.approx(norms, rel=1e-5)
        if case.accumulation == 1:
            first = first or results[0]
            assert bit_equal(results[0]["weights"], first["weights"]), (
                f"stage {stage} has other bits"
            )


def test_no_knob_changes_a_bit(ranks: Pools) -> None:
    case = Case(max_grad_norm=0.1)
    reference = ranks(2)(train_engine, case, ZeroOptions(stage=0))[0]["weights"]
    knobs = [
        ZeroOptions(stage=stage, bucket_elements=bucket, overlap=overlap)
        for stage in (0, 1, 2)
        for bucket in (1, 40, 10**9)
        for overlap in (False, True)
    ]
    knobs += [
        ZeroOptions(stage=3, overlap=overlap, units=units, prefetch_elements=prefetch)
        for overlap, prefetch in ((False, None), (True, 0), (True, None), (True, 10**6))
        for units in (None, [], ["blocks.1", "blocks.1.up"])
    ]
    knobs += [ZeroOptions(stage=3, persistence_elements=n) for n in (6, 50, 10**6)]
    knobs += [ZeroOptions(stage=3, prefetch_elements=10**6, max_live_elements=300)]
    for zero in knobs:
        assert bit_equal(ranks(2)(train_engine, case, zero)[0]["weights"], reference), zero


class Decoder(nn.Module):
    """Layers that all read one memory, each several times, as a decoder reads its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(16, 2, 24, 0.0) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, y = self.encoder(x), x
        for layer in self.layers:
            y = layer(y, memory)
        return y.square().mean()


def decode(ctx: RankContext, zero: ZeroOptions) -> dict[str, torch.Tensor]:
    torch.manual_seed(ctx.rank)
    with ZeroEngine(Decoder(), optimizer=ADAMW, zero=zero, mesh=ctx.mesh()) as engine:
        for _ in range(2):
            engine.backward(engine(torch.randn(7, 3, 16)))
            engine.step()
        return engine.full_state_dict(all_ranks=True)


def test_what_several_layers_read_has_the_same_bits_at_every_stage(ranks: Pools) -> None:
    reference = ranks(2)(decode, ZeroOptions(stage=0))[0]
    for stage in (1, 2, 3):
        weights = ranks(2)(decode, ZeroOptions(stage=stage, bucket_elements=150))[0]
        assert bit_equal(weights, reference), stage


def test_last_is_a_promise_about_traffic_and_never_about_the_result(ranks: Pools) -> None:
    promised = Case(accumulation=3, dtype="fp64", max_grad_norm=0.1)
    for stage in range(4):
        zero = ZeroOptions(stage=stage, bucket_elements=150)
        with_promise = ranks(2)(train_engine, promised, zero)[0]
        without = ranks(2)(train_engine, dataclasses.replace(promised, last_only=False), zero)[0]
        assert largest_difference(with_promise["weights"], without["weights"]) <= 1e-12
        sent = [sum(t.sent_bytes for t in r["transfers"]) for r in (with_promise, without)]
        assert sent[0] < sent[1] if stage < 2 else sent[0] == sent[1]
