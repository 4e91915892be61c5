"""The verbs of the state: save, load, export. All ranks of an engine call them alike.

[Note: imported on demand]
What reads checkpoints imports torch.distributed.checkpoint, which takes a third of the time in
which a rank starts. Most ranks never read any: `load` and `export` import it when they are called.
"""

import time
from collections.abc import Mapping
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from rayzero.engine.assembly import Assembly
from rayzero.engine.loss_scale import LossScale
from rayzero.engine.shelf import memory_of
from rayzero.engine.state import contents
from rayzero.engine.state.agreement import AXES, notify, rank_of, together, world_of
from rayzero.engine.state.extra import pack_extra
from rayzero.engine.state.folders import begin
from rayzero.engine.state.manifest import VERSION, Manifest
from rayzero.engine.state.planning import Index, Plan, Planner, brought
from rayzero.engine.state.saving import Payload, Save, stage, views_of
from rayzero.errors import CheckpointError
from rayzero.records import Phase


class Checkpoints:
    """Saves and loads one engine; at most one save is under way."""

    def __init__(self, parts: Assembly, loss_scale: LossScale, *, stage: int) -> None:
        self._parts = parts
        self._stage = stage
        self._comm = parts.comm
        self._loss_scale = loss_scale
        self._planner = Planner(parts)
        self._save: Save | None = None

    def save(self, folder: str | PathLike[str], extra: Any, *, wait: bool) -> Save:
        """Write a checkpoint, whole or not at all; gradients of an open window are not in it.

        extra: plain values and tensors of this rank, which `load` gives back. wait=False copies and
        returns, what is in memory to host memory, what is on disk to the file; Save.wait(), on all
        ranks, tells how it ended. What cannot be written raises CheckpointError on all ranks, and
        leaves the engine and what was in `folder` as they are.
        """
        self._settle()
        path = Path(folder).absolute()
        with torch.no_grad(), self._comm.ledger.during(Phase.CONTROL):
            packed = together(self._comm, partial(pack_extra, extra))
            together(self._comm, partial(self._begin, path))
            plan = self._planner.plan()
            manifest = self._manifest(plan.index, extra) if plan.index is not None else None
            self._save = Save(path, self._comm, self._parts.staging)
            self._write(self._save, plan, packed, manifest, wait=wait)
        return self._save

    def load(self, folder: str | PathLike[str], *, strict: bool) -> Any:
        """Load what any layout, stage and precision saved, or safetensors files of anyone's.

        Returns the extra of this rank (of rank modulo the ranks that saved, where there are more).
        Raise CheckpointError listing what does not fit, before anything is changed; strict=False
        allows missing and unexpected names and another optimizer. A file that turns out damaged
        while it is read raises DamagedCheckpointError and makes the trained weights NaN.
        """
        # See [Note: imported on demand].
        from rayzero.engine.state import loading

        self._settle()
        self._planner.forget()
        path, parts = Path(folder).absolute(), self._parts
        with torch.no_grad(), self._comm.ledger.during(Phase.CONTROL):
            source, extra = together(self._comm, partial(loading.opened, path, rank_of(self._comm)))
            match = loading.match_names(parts, source)
            loading.check_match(match, source, strict=strict)
            loading.read_into(parts, source, match)
            loading.restore_settings(parts, source, match, self._loss_scale)
            loading.tell_conversions(parts, source, match)
        return extra

    def export(self, folder: str | PathLike[str]) -> None:
        """Write weights and persistent buffers as sharded safetensors with an index.

        Dtypes are those of training, a tensor cut by tp is whole, and a tied one is there once.
        """
        # See [Note: imported on demand].
        from rayzero.engine.state.export import write_export

        self._settle()
        with torch.no_grad(), self._comm.ledger.during(Phase.CONTROL):
            write_export(self._parts, Path(folder).absolute())

    def close(self) -> None:
        """Let a save under way come to its end."""
        if self._save is not None:
            self._save.close()

    def _settle(self) -> None:
        """Wait for the save before; whoever asked for it has its error from `wait`."""
        save, self._save = self._save, None
        if save is not None:
            try:
                save.wait()
            except CheckpointError as error:
                notify(self._comm, str(error))

    def _begin(self, path: Path) -> None:
        if self._comm.is_first:
            begin(path)

    def _write(
        self, save: Save, plan: Plan, extra: bytes, manifest: Manifest | None, *, wait: bool
    ) -> None:
        on_disk, in_memory = brought(self._parts, plan), plan.in_memory
        payload = partial(Payload, num_bytes=plan.num_bytes, extra=extra, manifest=manifest)
        if wait:
            save.write(payload(at_once=(), views=views_of(chain(on_disk, in_memory))))
            save.wait()
        else:
            staging = stage(in_memory)
            self._parts.staging.append(staging)
            save.start(payload(at_once=views_of(on_disk), views=[memory_of(staging)]))

    def _manifest(self, index: Index, extra: Any) -> Manifest:
        counters = contents.counters_of(self._parts)
        steps = [c.numbers["step"].value for c in counters if "step" in c.numbers]
        step = extra.get("step") if isinstance(extra, Mapping) else None
        return Manifest(
            version=VERSION,
            stage=self._stage,
            mesh={axis: self._comm.size(axis) for axis in AXES},
            step=step if isinstance(step, int) else int(max(steps, default=0)),
            saved_unix_s=time.time(),
            optimizer=type(self._parts.optimizer.torch_optimizer).__name__,
            loss_scale=self._loss_scale.numbers(),
            groups=tuple(contents.groups_of(self._parts)),
            counters=tuple(counters),
            tied=contents.aliases_of(self._parts.module),
            files=tuple(index.sizes.get(rank, 0) for rank in range(world_of(self._comm))),
            tensors=index.tensors,
        )
