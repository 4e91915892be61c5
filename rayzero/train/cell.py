"""One rank's part of a cell: build, warm up, time, probe, report."""

import hashlib
import time
from dataclasses import replace
from typing import Protocol

import torch

from rayzero.config.cell import CellConfig
from rayzero.config.zero import Place
from rayzero.dist.process import Seat, return_freed_pages
from rayzero.engine import ZeroEngine
from rayzero.errors import DataError
from rayzero.records import Carrier, Phase, Progress, RankReport, StepSample, Transfer
from rayzero.train import probe
from rayzero.train.build import build_communicator, build_schedule, chosen_transport
from rayzero.train.checkpoints import TrainingCheckpoints, total_steps
from rayzero.train.data import Data, load_data
from rayzero.train.engines import AnyEngine, BuildEngine, build_any_engine, formula_for
from rayzero.train.rng import reseed
from rayzero.train.theory import num_params
from rayzero.train.trainer import LocalStep, Trainer

FREED_PAGES_ABOVE = 1 << 20


class Member(Protocol):
    """What the rank is told: where it sits, and where to leave signs of life."""

    @property
    def seat(self) -> Seat:
        """This rank's seat."""

    def progress(self, sign: Progress) -> None:
        """Leave a sign of life."""


def run_rank(
    member: Member, config: CellConfig, *, build: BuildEngine = build_any_engine
) -> RankReport:
    """Run one cell on this rank; the process group stands."""
    started = time.perf_counter()
    probe.reset_host_peak()
    if Place.DISK in (config.offload.optimizer, config.offload.params):
        return_freed_pages(above_bytes=FREED_PAGES_ABOVE)
    seat = member.seat
    device = torch.device(seat.device)
    data = load_data(config.data, vocab_size=config.model.vocab_size)
    comm = build_communicator(
        config.grid(seat.world), device, transport=chosen_transport(config, device)
    )
    with build(config, comm, device) as engine:
        check_same_data(engine, data)
        trainer = make_trainer(config, engine, data, seat.world, device)
        check_same_batch(engine, trainer)
        reseed(config.run.seed, trainer.next_step, data_rank=trainer.data_rank)
        with TrainingCheckpoints(
            config,
            engine=engine,
            trainer=trainer,
            device=device,
            data_fingerprint=data.fingerprint,
        ) as checkpoints:
            checkpoints.restore()
            build_s = time.perf_counter() - started
            steps, transfers = _train(member, config, trainer, engine, checkpoints)
            samples = checkpoints.samples(steps)
        report = _report(member, config, engine, trainer, data, samples, transfers, build_s)
        return replace(report, restored_steps=checkpoints.restored_steps)


def make_trainer(
    config: CellConfig, engine: AnyEngine, data: Data, world: int, device: torch.device
) -> Trainer:
    """Put the loop together."""
    return Trainer(
        config,
        engine=engine,
        comm=engine.comm,
        data=data,
        batching=config.batching(world),
        device=device,
        schedule=build_schedule(config.optimizer, engine.optimizer, total_steps(config)),
    )


def check_same_data(engine: AnyEngine, data: Data) -> None:
    """Raise DataError where ranks read another corpus."""
    digest = hashlib.blake2b(data.fingerprint.encode(), digest_size=6).digest()
    mine = torch.tensor([float(int.from_bytes(digest, "little"))], dtype=torch.float64)
    with engine.ledger.during(Phase.SETUP):
        rows = engine.comm.gather_rows(mine, axes=("replicate", "shard", "tp"))
    others = [r for r in range(rows.shape[0]) if rows[r] != rows[0]]
    if others:
        raise DataError(
            f"ranks read different data: rank 0 and ranks {others} have other fingerprints (this "
            f"rank: {data.fingerprint}); give every node the same files under data.path"
        )


def check_same_batch(engine: AnyEngine, trainer: Trainer) -> None:
    """Raise DataError where ranks of one tp group would train on different sequences."""
    mine = torch.tensor([float(trainer.batch_checksum() >> 11)], dtype=torch.float64)
    with engine.ledger.during(Phase.SETUP):
        rows = engine.comm.gather_rows(mine, axes=("tp",))
    if bool((rows != rows[0]).any()):
        raise DataError(
            "ranks of one tensor-parallel group got different sequences; batches must be a "
            "function of (data.seed, step, position) alone, also in data.factory"
        )


def _train(
    member: Member,
    config: CellConfig,
    trainer: Trainer,
    engine: AnyEngine,
    checkpoints: TrainingCheckpoints,
) -> tuple[list[LocalStep], tuple[Transfer, ...]]:
    """Run the steps that are left; return them with the transfers of the last."""
    steps: list[LocalStep] = []
    total = total_steps(config)
    tokens = config.data.global_batch * config.data.seq_len
    transfers: tuple[Transfer, ...] = ()
    while trainer.next_step < total:
        done = trainer.step()
        transfers = engine.ledger.transfers
        steps.append(done)
        sign = Progress(
            step=done.step + 1,
            num_steps=total,
            loss=float(done.loss),
            tokens_per_s=tokens / done.step_s,
        )
        member.progress(sign)
        checkpoints.after_step(steps)
    return steps, transfers


def _report(
    member: Member,
    config: CellConfig,
    engine: AnyEngine,
    trainer: Trainer,
    data: Data,
    samples: list[StepSample],
    transfers: tuple[Transfer, ...],
    build_s: float,
) -> RankReport:
    seat = member.seat
    formula = formula_for(config, engine, world=seat.world, rank=seat.rank)
    holdings = engine.holdings()
    validation = trainer.validation_loss() if config.run.validate else None
    return RankReport(
        rank=seat.rank,
        node=seat.node,
        device=seat.device,
        num_params=num_params(config, engine),
        steps=tuple(samples),
        holdings=holdings,
        formula=formula.holdings,
        transfers=transfers,
        formula_transfers=formula.transfers,
        peak_bytes=_peak_bytes(config, engine, trainer, torch.device(seat.device)),
        peak_host_bytes=probe.host_peak_bytes(),
        validation_loss=validation,
        data_fingerprint=data.fingerprint,
        build_s=build_s,
        weights_checksum=engine.weights_checksum(),
        carrier=engine.carrier if isinstance(engine, ZeroEngine) else Carrier.NATIVE,
    )


def _peak_bytes(
    config: CellConfig, engine: AnyEngine, trainer: Trainer, device: torch.device
) -> int | None:
    """Probe one step. On CPU only our own engine's: what it holds beforehand must be known."""
    if not config.run.probe or (device.type == "cpu" and not isinstance(engine, ZeroEngine)):
        return None
    return probe.peak_bytes(device, engine.held_tensors(), trainer.step)
