"""Training that survives its end: saved every so many steps, gone on with from the newest save.

A checkpoint's extra, beside what the engine saves: the next step (which is the data position, as
batches are a function of the step), the learning rate's schedule, generators, what the run is about
and all samples so far: a resumed run's series has neither a gap nor a double point.
"""

import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from rayzero.config.build import to_plain
from rayzero.config.cell import CellConfig
from rayzero.config.run import RESTORE_WORDS
from rayzero.engine import ZeroEngine
from rayzero.engine.state.agreement import CheckpointNotice
from rayzero.engine.state.folders import prune, scan
from rayzero.engine.state.saving import Save
from rayzero.errors import CheckpointError, ConfigError, DamagedCheckpointError
from rayzero.records import StepSample
from rayzero.train.engines import AnyEngine
from rayzero.train.rng import reseed, rng_state, set_rng_state
from rayzero.train.trainer import LocalStep, Trainer

AUTO, NEVER = RESTORE_WORDS


class TrainingCheckpoints:
    """Saves one cell's training and restores it; idle where run.checkpoint_folder is null."""

    def __init__(
        self,
        config: CellConfig,
        *,
        engine: AnyEngine,
        trainer: Trainer,
        device: torch.device,
        data_fingerprint: str,
    ) -> None:
        self._run = config.run
        self._engine = engine
        self._trainer = trainer
        self._device = device
        self._total = total_steps(config)
        self._about = about(config, data_fingerprint)
        self._samples: list[StepSample] = []
        self._num_sampled = 0
        self._pending: Save | None = None
        self.restored_steps = 0
        """Steps that were made before this process began."""

    def restore(self) -> None:
        """Go on as run.restore says; raise CheckpointError where only damaged saves are left."""
        if self._run.restore == NEVER:
            return
        if self._run.restore != AUTO:
            self._load(Path(self._run.restore))
        elif self._run.checkpoint_folder is not None:
            self._restore_newest(Path(self._run.checkpoint_folder))

    def after_step(self, steps: Sequence[LocalStep]) -> None:
        """Save where it is time; what fails is told, and training goes on."""
        step, folder = self._trainer.next_step, self._run.checkpoint_folder
        is_due = step % self._run.checkpoint_every_steps == 0 or step == self._total
        if folder is None or not is_due:
            return
        self.samples(steps)
        self._finish_pending()
        try:
            path = Path(folder) / f"step-{step:08d}"
            self._pending = self._saving_engine.save(path, self._extra(), wait=False)
        except CheckpointError as error:
            self._tell(str(error))

    def samples(self, steps: Sequence[LocalStep]) -> list[StepSample]:
        """Bring all ranks' new steps together; return all samples since step 0."""
        new = list(steps[self._num_sampled :])
        if new:
            first_timed = self._run.warmup_steps
            self._samples += self._trainer.samples(new, lambda step: step >= first_timed)
        self._num_sampled = len(steps)
        return list(self._samples)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last save; after an error other ranks may be gone, so leave it."""
        if kind is None:
            self._finish_pending()

    def _restore_newest(self, folder: Path) -> None:
        found = scan(folder)
        names = "\n".join(f"{one.path.name} {one.is_whole}" for one in found)
        self._check_alike(folder, names)
        damage = [one.damage for one in found if not one.is_whole and not one.is_interrupted]
        for text in damage:
            self._tell(f"not used: {text}")
        steps = {one.path: one.manifest.step for one in found if one.manifest is not None}
        # A run that was finished makes its last steps again: their bytes are measured anew.
        usable = [one for one in found if steps.get(one.path, self._total) < self._total]
        for one in usable:
            try:
                self._load(one.path)
            except DamagedCheckpointError as error:
                damage.append(str(error))
                self._tell(f"not used: {error}")
            else:
                return
        if usable or (damage and not steps):
            raise CheckpointError(
                f"run.checkpoint_folder={folder} has no whole checkpoint to go on from: "
                f"{'; '.join(damage)}. run.restore=never begins anew"
            )

    def _check_alike(self, folder: Path, names: str) -> None:
        mine = torch.tensor([float(zlib.crc32(names.encode()))], dtype=torch.float64)
        rows = self._engine.comm.gather_rows(mine, axes=("replicate", "shard", "tp"))
        if bool((rows != rows[0]).any()):
            raise CheckpointError(
                f"ranks see different checkpoints in run.checkpoint_folder={folder}; it must be on "
                "a file system that all nodes share"
            )

    def _load(self, path: Path) -> None:
        extra = self._saving_engine.load(path)
        if not isinstance(extra, dict) or "about" not in extra:
            self._tell(f"{path} holds no training state of a cell: weights are its, step is 0")
            return
        others = [
            f"{key}={self._about[key]!r} (saved: {value!r})"
            for key, value in extra["about"].items()
            if self._about.get(key) != value
        ]
        if others:
            raise ConfigError(
                f"{path} is of another training: {', '.join(others)}; set these as they were, name "
                "another run.checkpoint_folder, or begin anew with run.restore=never"
            )
        if extra["step"] >= self._total:
            raise ConfigError(
                f"{path} is at step {extra['step']} of {self._total}; raise run.num_steps to go on"
            )
        self._trainer.restore(extra["step"], extra["schedule"])
        self._samples = unpack_samples(extra["samples"])
        self.restored_steps = extra["step"]
        if extra["layout"] == self._layout():
            set_rng_state(extra["rng"], self._device)
        else:
            reseed(self._run.seed, extra["step"], data_rank=self._trainer.data_rank)

    def _extra(self) -> dict[str, Any]:
        return {
            "step": self._trainer.next_step,
            "schedule": self._trainer.schedule_state(),
            "samples": pack_samples(self._samples),
            "layout": self._layout(),
            "rng": rng_state(self._device),
            "about": self._about,
        }

    @property
    def _saving_engine(self) -> ZeroEngine:
        assert isinstance(self._engine, ZeroEngine), "CellConfig lets no peer ask for checkpoints"
        return self._engine

    def _layout(self) -> list[int]:
        return [self._engine.comm.size(axis) for axis in ("replicate", "shard", "tp")]

    def _finish_pending(self) -> None:
        """Wait for the save before, and remove those that are too old when it is whole."""
        save, self._pending = self._pending, None
        folder = self._run.checkpoint_folder
        if save is None or folder is None:
            return
        try:
            save.wait()
        except CheckpointError as error:
            self._tell(str(error))
            return
        if self._engine.comm.is_first:
            prune(Path(folder), self._run.checkpoint_keep)

    def _tell(self, text: str) -> None:
        if self._engine.comm.is_first:
            warnings.warn(text, CheckpointNotice, stacklevel=3)


def total_steps(config: CellConfig) -> int:
    """Return how many steps a cell makes, warm-up included."""
    return config.run.warmup_steps + config.run.num_steps * config.run.repeats


def about(config: CellConfig, data_fingerprint: str) -> dict[str, Any]:
    """Return what a run may not change when it goes on: the data, its batches, the optimizer."""
    return {
        "data": data_fingerprint,
        "data.global_batch": config.data.global_batch,
        "data.seq_len": config.data.seq_len,
        "run.seed": config.run.seed,
        "optimizer": to_plain(config.optimizer),
    }


def pack_samples(samples: Sequence[StepSample]) -> torch.Tensor:
    """Return samples as rows of numbers."""
    rows = [[s.step, s.loss, s.step_s, s.grad_norm, s.timed] for s in samples]
    return torch.tensor(rows, dtype=torch.float64).view(-1, 5)


def unpack_samples(rows: torch.Tensor) -> list[StepSample]:
    """Return what pack_samples packed."""
    return [
        StepSample(step=int(step), loss=loss, step_s=step_s, grad_norm=grad_norm, timed=bool(timed))
        for step, loss, step_s, grad_norm, timed in rows.tolist()
    ]
