"""The training loop, which exists once: batches in, samples out."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rayzero.config.cell import CellConfig
from rayzero.config.data import Batching
from rayzero.dist.comm import Communicator
from rayzero.protocol import Engine
from rayzero.records import Phase, StepReport, StepSample
from rayzero.train.data import Batch, Data, checksum, positions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStep:
    """One step as this rank saw it. loss: the mean over its own sequences, still on the device."""

    step: int
    loss: torch.Tensor
    step_s: float
    report: StepReport


class Trainer:
    """Runs steps of one cell on one rank."""

    def __init__(
        self,
        config: CellConfig,
        *,
        engine: Engine,
        comm: Communicator,
        data: Data,
        batching: Batching,
        device: torch.device,
        schedule: torch.optim.lr_scheduler.LRScheduler,
    ) -> None:
        self._config = config
        self._engine = engine
        self._comm = comm
        self._data = data
        self._batching = batching
        self._device = device
        self._schedule = schedule
        self.data_rank = comm.rank("replicate") * comm.size("shard") + comm.rank("shard")
        self.next_step = 0

    def step(self) -> LocalStep:
        """Train on the next global batch; the time runs from a barrier to this rank's end."""
        batches = [self._batch(micro) for micro in range(self._batching.accumulation)]
        losses = []
        self._comm.barrier()
        self._synchronize()
        started = time.perf_counter()
        for micro, (inputs, targets) in enumerate(batches):
            loss = self._engine(inputs, targets)
            losses.append(loss.detach())
            self._engine.backward(loss, last=micro == len(batches) - 1)
        report = self._engine.step()
        self._schedule.step()
        self._synchronize()
        step_s = time.perf_counter() - started
        done = LocalStep(
            step=self.next_step,
            loss=torch.stack(losses).double().mean(),
            step_s=step_s,
            report=report,
        )
        self.next_step += 1
        return done

    def samples(self, steps: list[LocalStep], is_timed: Callable[[int], bool]) -> list[StepSample]:
        """Bring all ranks' steps together: mean loss of the global batch, time of the slowest."""
        my_losses = torch.stack([s.loss.cpu() for s in steps])
        my_times = torch.tensor([s.step_s for s in steps], dtype=torch.float64)
        with self._comm.ledger.during(Phase.EVAL):
            over_data = self._comm.gather_rows(my_losses, axes=("replicate", "shard"))
            over_all = self._comm.gather_rows(my_times, axes=("replicate", "shard", "tp"))
        losses = over_data.mean(0).tolist()
        times = over_all.amax(0).tolist()
        return [
            StepSample(
                step=s.step,
                loss=loss,
                step_s=step_s,
                grad_norm=s.report.grad_norm,
                timed=is_timed(s.step),
            )
            for s, loss, step_s in zip(steps, losses, times, strict=True)
        ]

    def validation_loss(self) -> float:
        """Return the mean loss on held-out sequences, each seen by one data rank."""
        total = self._config.data.validation_sequences
        ranks = self._batching.dp
        count = -(-total // ranks)
        positions = range(self.data_rank * count, (self.data_rank + 1) * count)
        sums = []
        self._engine.eval()
        with torch.no_grad():
            for first in range(0, count, self._batching.micro_batch):
                chosen = positions[first : first + self._batching.micro_batch]
                inputs, targets = self._to_device(self._data.validation(chosen))
                sums.append(self._engine(inputs, targets).double().cpu() * len(chosen))
        self._engine.train()
        mine = (torch.stack(sums).sum() / count).reshape(1)
        with self._comm.ledger.during(Phase.EVAL):
            rows = self._comm.gather_rows(mine, axes=("replicate", "shard"))
        return float(rows.mean())

    def schedule_state(self) -> dict[str, Any]:
        """Return where the learning rate's schedule is."""
        return self._schedule.state_dict()

    def restore(self, next_step: int, schedule: dict[str, Any]) -> None:
        """Go on at a step; batches are a function of it."""
        self.next_step = next_step
        self._schedule.load_state_dict(schedule)

    def batch_checksum(self) -> int:
        """Return a number that tells this rank's next micro-batch from any other."""
        return checksum(self._data.batch(self.next_step, self._positions(0)))

    def _batch(self, micro: int) -> Batch:
        return self._to_device(self._data.batch(self.next_step, self._positions(micro)))

    def _positions(self, micro: int) -> range:
        return positions_of(self._batching, self.data_rank, micro)

    def _to_device(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self._device), targets.to(self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
