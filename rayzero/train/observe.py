"""One rank's part of an experiment: train a few steps under an altered door, and watch the last."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from rayzero.config.cell import CellConfig
from rayzero.dist.mesh import build_mesh
from rayzero.dist.observed import Links, ObservedCommunicator, counting_collectives
from rayzero.dist.transport import transport_for
from rayzero.engine import ZeroEngine
from rayzero.records import Alteration, Kind, Observation
from rayzero.train.cell import Member, make_trainer
from rayzero.train.checkpoints import total_steps
from rayzero.train.data import load_data
from rayzero.train.engines import AnyEngine, build_any_engine
from rayzero.train.theory import num_params

LATENCY_S = 0.01
STATES = (Kind.MASTER, Kind.MOMENTS)


def observe_rank(member: Member, config: CellConfig, alteration: Alteration) -> Observation:
    """Train the cell's steps on this rank; the process group stands."""
    seat = member.seat
    device = torch.device(seat.device)
    grid = config.grid(seat.world)
    links = Links(LATENCY_S)
    comm = ObservedCommunicator(
        build_mesh(device.type, replicate=grid.replicate, shard=grid.shard, tp=grid.tp),
        transport=links if alteration is Alteration.SLOW else transport_for,
        publishes=alteration is not Alteration.UNPUBLISHED,
    )
    data = load_data(config.data, vocab_size=config.model.vocab_size)
    with build_any_engine(config, comm, device) as engine:
        trainer = make_trainer(config, engine, data, seat.world, device)
        for _ in range(total_steps(config) - 1):
            trainer.step()
        batch = trainer.batch_checksum()
        comm.forget()
        before_s = links.exposed_s
        with counting_gradients(engine) as gradients, counting_collectives() as collectives:
            loss = trainer.step().loss
        return Observation(
            rank=seat.rank,
            num_params=num_params(config, engine),
            batch_checksum=batch,
            weights_checksum=engine.weights_checksum(),
            gradient_elements=gradients.total(),
            state_bytes_sent=comm.bytes_sent_of(states_of(engine)),
            collective_elements=dict(collectives),
            exposed_s=links.exposed_s - before_s,
            loss=float(loss),
        )


@contextmanager
def counting_gradients(engine: AnyEngine) -> Iterator[Counter[str]]:
    """Count the elements of each parameter's gradient as backward hands it over."""
    counts: Counter[str] = Counter()

    def count(name: str, gradient: torch.Tensor) -> None:
        counts[name] += gradient.numel()

    hooks = [
        parameter.register_hook(partial(count, name))  # type: ignore[no-untyped-call]
        for name, parameter in engine.module.named_parameters()
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def states_of(engine: AnyEngine) -> list[torch.Tensor]:
    """List our engine's master copies and moments."""
    if not isinstance(engine, ZeroEngine):
        return []
    return [tensor for kind, _, tensor in engine.held_by_kind() if kind in STATES]
