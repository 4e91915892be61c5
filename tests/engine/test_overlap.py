"""Overlap hides a link's latency behind compute: at least 70% of what 5 ms per transfer add."""

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rayzero.dist.comm import Communicator
from rayzero.dist.slow import Slow
from rayzero.engine import ZeroEngine, ZeroOptions
from tests.ranks import Pools, RankContext

LATENCY_S = 0.005
COMPUTE_S = 0.008
LAYERS = 16
STEPS = 3
HIDDEN = 0.7
"""The share of the added time that overlap must hide."""


class Busy(torch.autograd.Function):
    """Identity that takes COMPUTE_S forward and backward, and no core: others may be busy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(COMPUTE_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(COMPUTE_S)
        return grad


class Layer(nn.Module):
    """A linear that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Busy.apply(self.linear(x))


def exposed_time(ctx: RankContext, stage: int, overlap: bool) -> list[float]:
    """Return how long steps stood still for the link's latency, and what the ledger says."""
    links: list[Slow] = []

    def link(group: Any, device_type: str) -> Slow:
        links.append(Slow(group, LATENCY_S))
        return links[-1]

    exposed_s = noted_s = 0.0
    with ZeroEngine(
        nn.Sequential(*(Layer() for _ in range(LAYERS))),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        zero=ZeroOptions(stage=stage, bucket_elements=72, overlap=overlap),
        mesh=Communicator(ctx.mesh(), transport=link),
    ) as engine:
        for step in range(STEPS):
            before_s = sum(link.exposed_s for link in links)
            engine.backward(engine(torch.ones(2, 8)).square().sum())
            engine.step()
            if step:  # the first step gathers without knowing the order
                exposed_s += sum(link.exposed_s for link in links) - before_s
                noted_s += engine.ledger.waited_s
    return [exposed_s / (STEPS - 1), noted_s / (STEPS - 1)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overlap_hides_most_of_the_latency_of_a_link(ranks: Pools, stage: int) -> None:
    """E21."""
    one_by_one, overlapped = (ranks(2)(exposed_time, stage, overlap) for overlap in (False, True))
    for (added_s, added_noted_s), (left_s, left_noted_s) in zip(
        one_by_one, overlapped, strict=True
    ):
        print(f"stage {stage}: {added_s * 1e3:.0f} ms added, {left_s * 1e3:.0f} ms left")
        assert added_s > LAYERS * LATENCY_S
        assert left_s <= (1 - HIDDEN) * added_s
        assert added_noted_s >= added_s
        assert left_noted_s >= left_s
