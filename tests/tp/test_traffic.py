"""Tensor parallelism sends what Megatron counts: four all-reduces per layer and micro-batch."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from rayzero.config.model import Checkpointing
from rayzero.dist.comm import Communicator
from rayzero.records import Phase
from tests.ranks import Pools, RankContext
from tests.tp.cases import MODELS, batch_of, cut_model

BATCH_TOKENS = 3 * 12


def all_reduces(context: RankContext, name: str, checkpointing: str) -> Counter:
    """Count (unit, phase, elements) of one forward and backward."""
    config = replace(MODELS[name], checkpointing=Checkpointing(checkpointing))
    comm = Communicator(context.mesh(tp=context.world))
    model, _ = cut_model(config, torch.float32, comm)
    comm.ledger.begin_window()
    with comm.ledger.during(Phase.FORWARD):
        loss = model(*batch_of(config))
    with comm.ledger.during(Phase.BACKWARD):
        loss.backward()
    transfers = comm.ledger.transfers
    comm.close()
    assert {(t.op, t.axis) for t in transfers} == {("all_reduce", "tp")}
    return Counter((t.unit, t.phase, t.elements) for t in transfers)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_sends_two_all_reduces_forward_and_two_backward(ranks: Pools, name: str) -> None:
    config = MODELS[name]
    stream = BATCH_TOKENS * config.hidden
    expected = Counter({("tokens", Phase.FORWARD, stream): 1})
    for index in range(config.num_layers):
        expected[f"blocks.{index}.attention.o", Phase.FORWARD, stream] += 1
        expected[f"blocks.{index}.feed_forward.down", Phase.FORWARD, stream] += 1
        expected[f"blocks.{index}.attention", Phase.BACKWARD, stream] += 1
        expected[f"blocks.{index}.feed_forward", Phase.BACKWARD, stream] += 1
    expected["loss.max", Phase.FORWARD, BATCH_TOKENS] += 1
    sums = 3 if config.label_smoothing else 2
    expected["loss.sum", Phase.FORWARD, sums * BATCH_TOKENS] += 1
    expected["output", Phase.BACKWARD, stream] += 1
    for counted in ranks(2)(all_reduces, name, "none"):
        assert counted == expected


def ops_of_layers(context: RankContext, name: str) -> Counter:
    """Count (op, phase, again) of whole activations in the blocks, with sequence parallelism."""
    config = MODELS[name]
    comm = Communicator(context.mesh(tp=context.world))
    model, _ = cut_model(config, torch.float32, comm, sequence=True)
    comm.ledger.begin_window()
    with comm.ledger.during(Phase.FORWARD):
        loss = model(*batch_of(config))
    with comm.ledger.during(Phase.BACKWARD):
        loss.backward()
    transfers = comm.ledger.transfers
    comm.close()
    stream = BATCH_TOKENS * config.hidden
    assert {t.op for t in transfers} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(t.elements < stream for t in transfers if t.op == "all_reduce")
    inside = [t for t in transfers if t.unit.startswith("blocks.") and t.elements == stream]
    return Counter((t.op, t.phase, t.unit.endswith(".again")) for t in inside)


@pytest.mark.parametrize("name", MODELS)
def test_with_sequence_parallelism_a_layer_has_4_gathers_and_4_reduce_scatters(
    ranks: Pools, name: str
) -> None:
    """Korthikanti et al.: two of each forward, two of each backward; no send, no receive.

    What attention and the feed-forward part read is gathered again, each once, for their weights.
    """
    layers = MODELS[name].num_layers
    kinds = product(("all_gather", "reduce_scatter"), (Phase.FORWARD, Phase.BACKWARD), (False,))
    expected = Counter(dict.fromkeys(kinds, 2 * layers))
    expected["all_gather", Phase.BACKWARD, True] = 2 * layers
    for counted in ranks(2)(ops_of_layers, name):
        assert counted == expected


def test_recomputing_a_block_repeats_its_forward_all_reduces_but_the_last(ranks: Pools) -> None:
    """torch stops recomputing at the last saved tensor, which lies before the last all-reduce."""
    plain = ranks(2)(all_reduces, "gpt2 tied", "none")[0]
    again = ranks(2)(all_reduces, "gpt2 tied", "full")[0] - plain
    stream = BATCH_TOKENS * MODELS["gpt2 tied"].hidden
    assert again == Counter(
        {(f"blocks.{i}.attention.o", Phase.BACKWARD, stream): 1 for i in range(2)}
    )
