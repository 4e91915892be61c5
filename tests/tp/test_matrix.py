"""Every stage, tp degree, sequence parallelism and recomputation trains the same model."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from rayzero.config.model import Checkpointing, ModelConfig
from rayzero.dist.comm import Communicator
from rayzero.engine import ZeroEngine, ZeroOptions
from tests.ranks import Pools, RankContext
from tests.tp.cases import LLAMA, SMALL, cut, whole_model

WORLD, STEPS, SEQUENCES, TOKENS = 4, 5, 8, 12
MAX_GRAD_NORM = 0.8
BOUND = 1e-5
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3, fused=True)
"""An eps above the rounding of gradients that are zero, which Adam would blow up to full steps."""

CONFIGS = {
    "gpt2": replace(SMALL, vocab_size=63, num_kv_heads=2),
    "llama": replace(LLAMA, vocab_size=62, num_kv_heads=4, fused_qkv=True, label_smoothing=0.1),
}
MODES = list(Checkpointing)


@dataclass(frozen=True)
class Case:
    """One way to lay the training out; accumulation and replicas come along by turns."""

    stage: int
    tp: int
    sequence: bool
    checkpointing: Checkpointing
    accumulation: int
    replicate: int


@dataclass(frozen=True)
class Trained:
    """What a training leaves: losses and norms by step, the first gradients, the last weights."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def cases(tp: int) -> list[Case]:
    """List all stages with and without sequence parallelism; the rest takes turns."""
    pairs = list(product(range(4), (False, True) if tp > 1 else (False,)))
    return [
        Case(
            stage=stage,
            tp=tp,
            sequence=sequence,
            checkpointing=MODES[(turn + tp) % 3],
            accumulation=1 + turn % 2 if tp < 4 else 2 - stage % 2,
            replicate=2 if tp < 4 and stage % 2 else 1,
        )
        for turn, (stage, sequence) in enumerate(pairs)
    ]


def batch(step: int, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return a step's global batch, a few targets ignored (as many in each sequence)."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(config.vocab_size, (SEQUENCES, TOKENS + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:, step] = -100
    return tokens[:, :-1], targets


def by_one_process(config: ModelConfig) -> Trained:
    """Train with torch alone."""
    model = whole_model(config, torch.float32)
    optimizer = ADAMW(model.parameters())
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        loss = model(*batch(step, config))
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, gradients, model.state_dict())


def by_engine(case: Case, config: ModelConfig, comm: Communicator) -> Trained:
    """Train the same with the engine."""
    model = whole_model(replace(config, checkpointing=case.checkpointing), torch.float32)
    table = cut(model, config, comm, sequence=case.sequence)
    dp = comm.size("replicate") * comm.size("shard")
    data_rank = comm.rank("replicate") * comm.size("shard") + comm.rank("shard")
    losses, norms, gradients = [], [], {}
    with ZeroEngine(
        model,
        optimizer=ADAMW,
        zero=ZeroOptions(stage=case.stage, bucket_elements=3000),
        mesh=comm,
        tensor_parallel=table,
        max_grad_norm=MAX_GRAD_NORM,
    ) as engine:
        for step in range(STEPS):
            inputs, targets = (t.chunk(dp)[data_rank] for t in batch(step, config))
            mean = torch.zeros(1, dtype=torch.float64)
            for micro in range(case.accumulation):
                part = (t.chunk(case.accumulation)[micro] for t in (inputs, targets))
                loss = engine(*part)
                engine.backward(loss, last=micro == case.accumulation - 1)
                mean += loss.detach().double() / case.accumulation
            losses.append(float(comm.gather_rows(mean, axes=("replicate", "shard")).mean()))
            if step == 0:
                gradients = engine.full_gradients(all_ranks=True)
            norms.append(engine.step().grad_norm)
        weights = engine.full_state_dict(all_ranks=True)
    return Trained(losses, norms, gradients, weights)


def worst(ours: Trained, wanted: Trained) -> dict[str, float]:
    """Return the largest error of each kind, relative to the largest element (see below).

    A key's bias has no influence on softmax, so its gradient is rounding noise: no gradient is
    measured by less than a hundredth of the model's largest.
    """
    floor = max(float(g.abs().max()) for g in wanted.gradients.values()) / 100
    assert ours.gradients.keys() == wanted.gradients.keys()
    assert ours.weights.keys() == wanted.weights.keys()

    def errors(found: dict[str, Tensor], whole: dict[str, Tensor], least: float) -> float:
        for name, tensor in found.items():
            assert tensor.shape == whole[name].shape, name
        return max(
            float((found[n] - whole[n]).abs().max()) / max(float(whole[n].abs().max()), least)
            for n in found
        )

    def relative(found: list[float], whole: list[float]) -> float:
        return max(abs(a / b - 1) for a, b in zip(found, whole, strict=True))

    return {
        "loss": relative(ours.losses, wanted.losses),
        "norm": relative(ours.norms, wanted.norms),
        "gradients": errors(ours.gradients, wanted.gradients, floor),
        "weights": errors(ours.weights, wanted.weights, 0.0),
    }


def largest_errors(context: RankContext, flavour: str, tp: int) -> dict[Case, dict[str, float]]:
    """Train every case of this tp degree."""
    config = CONFIGS[flavour]
    wanted = by_one_process(config)
    assert min(wanted.norms) > MAX_GRAD_NORM, "each step clips"
    found = {}
    for case in cases(tp):
        comm = Communicator(context.mesh(tp=tp, replicate=case.replicate))
        found[case] = worst(by_engine(case, config, comm), wanted)
        comm.close()
    return found


@pytest.mark.parametrize("flavour", CONFIGS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_loss_gradients_and_weights_are_those_of_one_process(
    ranks: Pools, tp: int, flavour: str
) -> None:
    for found in ranks(WORLD)(largest_errors, flavour, tp):
        for case, errors in found.items():
            assert max(errors.values()) <= BOUND, (case, errors)
