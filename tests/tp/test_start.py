"""Every tp rank starts from its block of the same weights."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayzero.config.model import ModelConfig
from rayzero.dist.comm import Communicator
from rayzero.layout.spec import ParamSpec, Span, TpShard
from rayzero.models.init import Initializer
from rayzero.models.transformer import Transformer
from rayzero.parallel.start import ROW_BLOCK_ELEMENTS, draw_local
from rayzero.theory.shapes import shape_of
from tests.ranks import Pools, RankContext
from tests.tp.cases import MODELS, batch_of, block_of, cut, whole_model

WIDE = ModelConfig(hidden=384, num_heads=4)
"""Its matrices are drawn in several chunks."""

Values = dict[str, tuple[TpShard | None, torch.Tensor]]


def start_from_meta(context: RankContext, name: str) -> Values:
    """Cut a model on meta, then draw this rank's elements in two pieces, as an engine would."""
    torch.manual_seed(context.rank)
    config = MODELS[name]
    comm = Communicator(context.mesh(tp=context.world))
    with torch.device("meta"):
        model = Transformer(config)
    shards = cut(model, config, comm)
    comm.close()
    initializer = Initializer(config, 3)
    values: Values = {}
    for key, parameter in model.named_parameters():
        assert parameter.is_meta
        middle, stop, tp = parameter.numel() // 3, parameter.numel(), shards.get(key)
        spec = ParamSpec(name=key, shape=tuple(parameter.shape), dtype="fp32", tp=tp)
        first = draw_local(initializer, spec, Span(start=0, stop=middle))
        second = draw_local(initializer, spec, Span(start=middle, stop=stop))
        values[key] = (tp, torch.cat((first, second)).view(parameter.shape))
    return values


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
def test_joined_shards_are_bit_equal_to_the_whole_parameter(
    ranks: Pools, tp: int, name: str
) -> None:
    """T06: so weights are as wide as those of the whole parameter, at any tp."""
    by_rank = ranks(tp)(start_from_meta, name)
    initializer = Initializer(MODELS[name], 3)
    for key, (first, values) in by_rank[0].items():
        shape = initializer.shape(key)
        whole = initializer(key, 0, torch.Size(shape).numel()).view(shape)
        if first is None:
            assert all(torch.equal(rank[key][1], whole) for rank in by_rank), key
        else:
            joined = torch.cat([rank[key][1] for rank in by_rank], dim=first.dim)
            assert torch.equal(joined[: shape[0]], whole), key
            assert not joined[shape[0] :].any(), "padding starts as zeros"
            assert values.shape[first.dim] == -(-whole.shape[first.dim] // tp)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ways", [2, 4])
def test_theory_knows_which_dim_is_cut(ranks: Pools, ways: int, name: str) -> None:
    values = ranks(ways)(start_from_meta, name)[0]
    theory = {
        p.name: (p.tp_dim if p.is_cut(ways) else None, p.local_shape(ways))
        for p in shape_of(MODELS[name]).params
    }
    found = {k: (tp and tp.dim, tuple(v.shape)) for k, (tp, v) in values.items()}
    assert found == theory


@settings(deadline=None, max_examples=50)
@given(data=st.data(), dim=st.sampled_from([0, 1]), count=st.sampled_from([1, 2, 4, 8]))
def test_any_span_of_a_block_equals_that_part_of_the_cut_matrix(
    data: st.DataObject, dim: int, count: int
) -> None:
    initializer, name = Initializer(WIDE, 0), "blocks.1.feed_forward.down.weight"
    shape = initializer.shape(name)
    tp = TpShard(dim=dim, index=data.draw(st.integers(0, count - 1)), count=count)
    block = block_of(initializer(name, 0, math.prod(shape)).view(shape), tp)
    place = st.integers(0, block.numel())
    start, stop = sorted(data.draw(st.tuples(place, place)))
    spec = ParamSpec(name=name, shape=tuple(block.shape), dtype="fp32", tp=tp)
    got = draw_local(initializer, spec, Span(start=start, stop=stop))
    assert torch.equal(got, block.flatten()[start:stop])


def test_a_span_of_a_huge_matrix_is_drawn_some_rows_at_a_time() -> None:
    """1T's matrices: 163 rows at a time; a span over the seam has no gap and no whole is made."""
    hidden, count = 25600, 8
    initializer = Initializer(ModelConfig(num_layers=1, hidden=hidden, num_heads=160), 0)
    name, width = "blocks.0.attention.o.weight", hidden // count
    drawn = []

    def recording(name: str, start: int, stop: int) -> torch.Tensor:
        drawn.append(stop - start)
        return initializer(name, start, stop)

    tp = TpShard(dim=1, index=3, count=count)
    spec = ParamSpec(name=name, shape=(hidden, width), dtype="fp32", tp=tp)
    start, stop = 160 * width - 700, 330 * width + 900
    got = draw_local(recording, spec, Span(start=start, stop=stop))
    assert got.numel() == stop - start
    assert max(drawn) <= ROW_BLOCK_ELEMENTS
    assert len(drawn) == 2
    for row in (160, 321, 322, 323, 329):
        first, at = row * hidden + 3 * width, row * width - start
        assert torch.equal(got[at : at + width], initializer(name, first, first + width))


def first_loss(context: RankContext, tp: int) -> float:
    """Return the first loss at this tp degree, of weights drawn from the initializer alone."""
    config = MODELS["gpt2 tied"]
    comm = Communicator(context.mesh(tp=tp))
    model = whole_model(config, torch.float32)
    cut(model, config, comm)
    loss = model(*batch_of(config)).item()
    comm.close()
    return loss


def test_the_first_loss_is_equal_for_every_tp(ranks: Pools) -> None:
    losses = [loss for tp in (1, 2, 4) for loss in ranks(4)(first_loss, tp)]
    assert max(losses) - min(losses) <= 1e-5 * losses[0]
