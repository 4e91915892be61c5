"""Our engine or a peer, behind the same verbs, and what theory says of it.

[Note: imported on demand]
A peer's library costs seconds and memory that belong to no other engine's figures, so its module is
imported when it is asked for.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rayzero.baselines.peer import PeerEngine
from rayzero.config.cell import CellConfig
from rayzero.config.engine import EngineName
from rayzero.dist.comm import Communicator
from rayzero.engine import ZeroEngine
from rayzero.records import Holdings, Transfer
from rayzero.theory.memory import holdings_of
from rayzero.theory.traffic import step_transfers
from rayzero.train.build import build_engine_on
from rayzero.train.theory import question_for, tp_transfers_for

AnyEngine = ZeroEngine | PeerEngine
BuildEngine = Callable[[CellConfig, Communicator, torch.device], AnyEngine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """Bytes that theory expects a rank to hold and send; empty for a peer, which has no theory."""

    holdings: Holdings
    transfers: tuple[Transfer, ...]


def build_any_engine(config: CellConfig, comm: Communicator, device: torch.device) -> AnyEngine:
    """Build what engine.name names."""
    if config.engine.name is EngineName.RAYZERO:
        return build_engine_on(config, comm)
    return build_peer(config.engine.name.value, config, comm, device)


def build_compute_only(config: CellConfig, comm: Communicator, device: torch.device) -> PeerEngine:
    """Build the reference that sends nothing, whatever engine.name says."""
    return build_peer("compute_only", config, comm, device)


def build_peer(
    name: str, config: CellConfig, comm: Communicator, device: torch.device
) -> PeerEngine:
    """Build train/peers/NAME.py's peer. See [Note: imported on demand]."""
    maker = importlib.import_module(f"rayzero.train.peers.{name}")
    peer, module = maker.make(config, comm, device)
    world = comm.size("replicate") * comm.size("shard") * comm.size("tp")
    return PeerEngine(
        peer,
        module,
        comm,
        accumulation=config.batching(world).accumulation,
        max_grad_norm=config.optimizer.max_grad_norm,
    )


def formula_for(config: CellConfig, engine: AnyEngine, *, world: int, rank: int) -> Formula:
    """Ask theory about one rank in steady state."""
    if isinstance(engine, PeerEngine):
        return Formula(holdings=Holdings(entries=()), transfers=())
    question = question_for(config, engine, world, rank)
    micro_steps = config.batching(world).accumulation
    transfers = step_transfers(question, backwards=micro_steps, reductions=1)
    return Formula(
        holdings=holdings_of(question),
        transfers=transfers + tp_transfers_for(config, engine, question, micro_steps),
    )
