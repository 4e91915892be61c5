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


class Scaled(nn.Embedding):
    """An embedding that computes something else, as Gemma's does."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return rows times two."""
        return 2.0 * super().forward(tokens)


def refusal(context: RankContext, plan: Plan, outputs: int) -> str:
    """Return the message that the plan gets for our model with one more linear beside it."""
    comm = Communicator(context.mesh(tp=context.world))
    with torch.device("meta"):
        model = Transformer(MODELS["gpt2 tied"])
        model.add_module("extra", nn.Linear(4, outputs))
        model.add_module("scaled", Scaled(4, 4))
    model.add_module("error", nn.MSELoss())
    model.add_module("weighted", nn.CrossEntropyLoss(reduction="sum"))
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
        ({"scaled": Style.VOCAB}, ["scaled", "vocab", "a plain Embedding", "Scaled"]),
        ({"error": Style.VOCAB}, ["error", "vocab", "MSELoss"]),
        ({"weighted": Style.VOCAB}, ["weighted", "mean over tokens", "ignore_index=-100"]),
        ({"loss": Style.VOCAB}, ["loss", "no Linear before it"]),
        ({"blocks": Style.COLUMN}, ["blocks", "weights are in modules inside it"]),
        ({"tokens": Style.VOCAB}, ["output.weight", "shares", "output no style"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
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
