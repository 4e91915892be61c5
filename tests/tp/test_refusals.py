"""A plan that would give wrong results is refused with the name and the way out."""

import pytest
import torch
from torch import nn

from rayzero.dist.comm import Communicator
from rayzero.errors import ConfigError
from rayzero.models.transformer import Transformer
from rayzero.parallel.apply import apply
from rayzero.parallel.plan import Plan, Style
from tests.ranks import Pools, RankContext
from tests.tp.cases import MODELS


def refusal(context: RankContext, plan: Plan, outputs: int) -> str:
    """Return the message that the plan gets for our model with one more linear beside it."""
    comm = Communicator(context.mesh(tp=context.world))
    with torch.device("meta"):
        model = Transformer(MODELS["gpt2 tied"])
        model.add_module("extra", nn.Linear(4, outputs))
    with pytest.raises(ConfigError) as caught:
        apply(model, plan, comm)
    comm.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"blocks.*.atention": Style.COLUMN}, ["blocks.*.atention", "no module"]),
        ({"extra": Style.COLUMN}, ["parallel.tp=2", "extra.weight", "5"]),
        ({"norm": Style.ROW}, ["norm", "row", "LayerNorm"]),
        ({"tokens": Style.VOCAB}, ["output.weight", "shares", "output no style"]),
    ],
    ids=["no such module", "does not divide", "wrong kind", "shared"],
)
def test_a_plan_that_does_not_fit_is_refused(ranks: Pools, plan: Plan, words: list[str]) -> None:
    for message in ranks(2)(refusal, plan, 5):
        assert all(word in message for word in words), message


def cut_first_match(context: RankContext) -> set[str]:
    """Cut all linears but one that an earlier pattern replicates."""
    comm = Communicator(context.mesh(tp=context.world))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shards = apply(model, {"0": Style.REPLICATE, "*": Style.COLUMN}, comm)
    comm.close()
    return set(shards)


def test_the_first_pattern_that_matches_counts(ranks: Pools) -> None:
    assert ranks(2)(cut_first_match)[0] == {"1.weight", "1.bias"}
