"""torch's own modules and modes under every stage: recurrent, attention, convolution, autocast."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from rayzero.engine import ZeroEngine, ZeroOptions
from tests.engine.harness import (
    ADAMW,
    EVERY_STAGE,
    SMALL_SGD,
    STAGE_3,
    Moment,
    Script,
    assert_nothing_gathered,
    assert_trains_like_plain,
    built,
)
from tests.engine.reference import bit_equal
from tests.ranks import Pools, RankContext


class Lstm(nn.Module):
    """Two layers whose weights torch keeps in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0]).square().mean()


class Attention(nn.Module):
    """Attention that uses its child's weight without calling it, in repeated blocks and alone."""

    def __init__(self) -> None:
        super().__init__()
        make = partial(nn.TransformerEncoderLayer, 4, 2, 8, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(make(), 2, enable_nested_tensor=False)
        self.alone = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks(x)
        return self.alone(h, h, h, need_weights=False)[0].square().mean()


class Convolution(nn.Module):
    """Convolutions with an activation that works in place, and a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(5, 4, 1), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Normed(nn.Module):
    """Weights that are computed from other parameters at each use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Linear(4, 4))
        self.last = spectral_norm(nn.Linear(4, 4))
        # Its power iteration changes buffers in each forward, which REF makes more of.
        self.last.parametrizations.weight[0].eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()).square().mean()


class Sparse(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, sparse=True)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 3).long() % 9
        return self.last(self.embedding(tokens)).square().mean()


def sequence_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine(now.noise(2, 5, 4))


@pytest.mark.parametrize("make", [Lstm, Attention, Convolution, Normed])
def test_torch_modules_train_like_one_process(ranks: Pools, make: Callable[[], nn.Module]) -> None:
    script = Script(make=make, loss=sequence_loss, steps=2)
    assert_trains_like_plain(ranks, script, options=[*EVERY_STAGE, *STAGE_3], bound=1e-9)


def test_sparse_gradients_are_summed_as_dense_ones(ranks: Pools) -> None:
    script = Script(make=Sparse, loss=sequence_loss, micros=2, optimizer=SMALL_SGD)
    assert_trains_like_plain(ranks, script, options=[*EVERY_STAGE, *STAGE_3])


def under_autocast(ctx: RankContext) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in range(4):
        script = Script(make=Attention, loss=sequence_loss)
        with ZeroEngine(
            built(script).float(), optimizer=ADAMW, zero=ZeroOptions(stage=stage), mesh=ctx.mesh()
        ) as engine:
            for step in range(3):
                x = Moment(ctx.rank, step, 0).noise(2, 5, 4).float()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = engine(x)
                engine.backward(loss)
                engine.step()
            found.append(engine.full_state_dict(all_ranks=True))
    return found


def test_autocast_gives_the_same_bits_at_every_stage(ranks: Pools) -> None:
    """Its cache of cast weights must not outlive a step or a gathered unit."""
    for found in ranks(2)(under_autocast):
        assert all(bit_equal(state, found[0]) for state in found)


def in_inference_mode(ctx: RankContext) -> list[bool]:
    found = []
    script = Script(make=Convolution, loss=sequence_loss)
    for stage in range(4):
        states = []
        for looks_on in (False, True):
            with ZeroEngine(
                built(script), optimizer=ADAMW, zero=ZeroOptions(stage=stage), mesh=ctx.mesh()
            ) as engine:
                for step in range(2):
                    if looks_on:
                        with torch.inference_mode():
                            sequence_loss(engine, Moment(ctx.rank, step, 1))
                        assert_nothing_gathered(engine)
                    engine.backward(sequence_loss(engine, Moment(ctx.rank, step, 0)))
                    engine.step()
                states.append(engine.full_state_dict(all_ranks=True))
        found.append(bit_equal(*states))
    return found


def test_inference_mode_before_and_between_steps(ranks: Pools) -> None:
    assert ranks(2)(in_inference_mode) == [[True] * 4] * 2


class Penalty(nn.Module):
    """A loss that holds the gradient of its output for its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = self.layers(x).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return y.square() + (grad.norm() - 1).square()


def test_a_gradient_penalty_inside_the_forward(ranks: Pools) -> None:
    script = Script(make=Penalty, loss=sequence_loss, micros=2)
    assert_trains_like_plain(ranks, script, options=[*EVERY_STAGE, *STAGE_3])
