"""ZeroEngine: forward, backward, step. It ties a stage, the optimizer and the norm to a module."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rayzero.dist.comm import Communicator
from rayzero.dist.ledger import Ledger
from rayzero.dist.mesh import default_mesh
from rayzero.dist.process import current_store
from rayzero.engine import build, holdings, whole
from rayzero.engine.assembly import Choices, assemble
from rayzero.engine.build import GroupsFactory
from rayzero.engine.loss_scale import LossScale
from rayzero.engine.norm import Window, clip_factor
from rayzero.engine.optimizer import OptimizerFactory
from rayzero.engine.options import OffloadOptions, PrecisionOptions, ZeroOptions
from rayzero.engine.stage import data_axis
from rayzero.engine.state.checkpoints import Checkpoints
from rayzero.engine.state.saving import Save
from rayzero.engine.values import Initializer
from rayzero.engine.window import OpenWindow
from rayzero.errors import ConfigError, EngineError, NonFiniteGradientError
from rayzero.layout.spec import FlatLayout, TpShard
from rayzero.records import Carrier, Holdings, Kind, Phase, StepReport, Uses, Where

NONFINITE_POLICIES = ("raise", "skip", "ignore")


class ZeroEngine:
    """Train any nn.Module under ZeRO stage 0, 1, 2 or 3, on all ranks of a mesh.

    optimizer: called with param groups of flat shards, returns an element-wise torch optimizer.
    param_groups: called with named parameters, returns torch param groups; None is one group.
    mesh: axes out of "replicate", "shard", "tp" (or a Communicator over one); default: all "shard".
    tensor_parallel: which parameters are blocks over tp, as parallel.apply returns.
    max_grad_norm: clip the global norm to this. on_nonfinite: "raise", "skip" or "ignore".
    initialize, seed: values of a module on meta, see engine.values.

    A window is any number of backwards and one step; its gradient is sum(w g) / sum(w) over
    backwards and data ranks. A parameter without gradient counts as having a zero one, at every
    stage. Weights and buffers start as rank 0's on all data ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: OptimizerFactory,
        param_groups: GroupsFactory | None = None,
        zero: ZeroOptions = ZeroOptions(),  # noqa: B008 - frozen
        precision: PrecisionOptions = PrecisionOptions(),  # noqa: B008 - frozen
        offload: OffloadOptions = OffloadOptions(),  # noqa: B008 - frozen
        mesh: DeviceMesh | Communicator | None = None,
        tensor_parallel: Mapping[str, TpShard] | None = None,
        max_grad_norm: float | None = None,
        on_nonfinite: str = "raise",
        initialize: Initializer | None = None,
        seed: int = 0,
    ) -> None:
        if on_nonfinite not in NONFINITE_POLICIES:
            allowed = ", ".join(NONFINITE_POLICIES)
            raise ConfigError(f"on_nonfinite={on_nonfinite!r} is unknown; allowed: {allowed}")
        self.module = module
        self.zero = zero
        self.comm = _communicator(module, mesh)
        self._max_grad_norm = max_grad_norm
        self._on_nonfinite = on_nonfinite
        self._loss_scale = LossScale(precision.loss_scale)
        choices = Choices(
            optimizer=optimizer,
            param_groups=param_groups,
            zero=zero,
            precision=precision,
            tensor_parallel=tensor_parallel or {},
            offload=offload,
            initialize=initialize,
            seed=seed,
        )
        self._parts = assemble(module, self.comm, choices)
        self._checkpoints = Checkpoints(self._parts, self._loss_scale, stage=zero.stage)
        self._stage = self._parts.stage
        self._trained = self._parts.trained
        self._window = OpenWindow(self._parts, self._loss_scale, stage=zero.stage)
        self._num_gathered = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        trains = self.module.training and torch.is_grad_enabled() and bool(self._trained)
        self._window.open(stays_open=trains)
        self._stage.start_forward()
        with self.ledger.during(Phase.FORWARD if trains else Phase.EVAL):
            try:
                return self.module(*args, **kwargs)
            finally:
                self._stage.end_forward()

    def backward(
        self,
        loss: torch.Tensor,
        *,
        last: bool = True,
        weight: float = 1.0,
        retain_graph: bool = False,
    ) -> None:
        """Add one micro-batch's gradient to the window, weighted.

        last=False promises that another backward follows before the step: stages 0 and 1 then keep
        the gradient local. The result is the same either way.
        """
        if loss.numel() != 1:
            raise EngineError(
                f"backward needs a scalar loss, found shape {tuple(loss.shape)}; reduce it first"
            )
        self._window.backward(loss, last=last, weight=weight, retain=retain_graph)

    def step(self) -> StepReport:
        """Apply the window's gradient and end the window; raise EngineError if there is none."""
        if self._num_gathered:
            raise EngineError("step() inside engine.gathered(): leave the block first")
        window, scale = self._window.settle(), self._loss_scale.value
        with self.ledger.during(Phase.STEP), torch.no_grad():
            applied = self._judge(window)
            clip = clip_factor(window.grad_norm, self._max_grad_norm)
            if applied:
                self._scale(clip, window, scale)
                self._parts.optimizer.take_written(window.flags)
                self._parts.optimizer.update([self._stage.gradient(f) for f in self._trained])
                self._stage.publish()
        report = StepReport(
            applied=applied,
            grad_norm=window.grad_norm,
            clip_factor=clip,
            loss_scale=scale,
            num_backwards=self._window.num_backwards,
        )
        self._window.clear()
        return report

    def zero_grad(self) -> None:
        """Abandon the window: forget its gradients. All ranks must do the same."""
        self._window.clear()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the window's gradient; the norm that step() reports follows."""
        self._window.settle()
        with torch.no_grad():
            for flat in self._trained:
                self._stage.gradient(flat).mul_(factor)

    def full_gradients(self, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
        """Return the window's averaged gradients whole, by name, on rank 0 (else empty) or all."""
        window = self._window.settle()
        with self.ledger.during(Phase.CONTROL), torch.no_grad():
            pairs = [(f, self._stage.gradient(f)) for f in self._trained]
            tensors = whole.full_tensors(pairs, self.comm, keep=all_ranks or self.comm.is_first)
        divisor = window.weight * self._loss_scale.value
        return {name: tensor / divisor for name, tensor in tensors.items()}

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
        """Return full weights and buffers by the module's names, on rank 0 (else empty) or all."""
        with self.ledger.during(Phase.CONTROL), torch.no_grad():
            return whole.full_weights(self._parts, keep=all_ranks or self.comm.is_first)

    @contextlib.contextmanager
    def gathered(
        self, what: nn.Module | Sequence[nn.Parameter], *, writer_rank: int | None = None
    ) -> Iterator[None]:
        """Hold full weights inside the block. What is written there survives only with a writer.

        writer_rank: place on the shard axis of the rank whose values all ranks take over.
        """
        parameters = list(what.parameters()) if isinstance(what, nn.Module) else list(what)
        self._num_gathered += 1
        try:
            with (
                self.ledger.during(Phase.CONTROL),
                whole.gathered(self._parts, parameters, writer_rank),
            ):
                yield
        finally:
            self._num_gathered -= 1

    def save(self, folder: str | PathLike[str], extra: Any = None, *, wait: bool = True) -> Save:
        """Write a checkpoint that any other layout can load; see Checkpoints.save."""
        return self._checkpoints.save(folder, extra, wait=wait)

    def load(self, folder: str | PathLike[str], *, strict: bool = True) -> Any:
        """Load a checkpoint or an export, drop the window, return the saved extra."""
        self.zero_grad()
        return self._checkpoints.load(folder, strict=strict)

    def export(self, folder: str | PathLike[str]) -> None:
        """Write weights and buffers as safetensors, by the module's own names."""
        self._checkpoints.export(folder)

    def train(self) -> None:
        """Put the module in training mode."""
        self.module.train()

    def eval(self) -> None:
        """Put the module in evaluation mode."""
        self.module.eval()

    def holdings(self) -> Holdings:
        """Count the bytes this rank holds now, by kind."""
        return holdings.count(self._parts)

    def held_tensors(self) -> list[torch.Tensor]:
        """List the tensors behind holdings()."""
        return [tensor for _, _, _, tensor in holdings.held_tensors(self._parts)]

    def held_by_kind(self) -> list[tuple[Kind, Where, torch.Tensor]]:
        """List them with kind and place."""
        return [(kind, where, t) for kind, where, _, t in holdings.held_tensors(self._parts)]

    def weights_checksum(self) -> str:
        """Sum up the weights this rank holds whole; equal on all data ranks, empty at stage 3."""
        flats = [flat.whole for flat in self._parts.flats if not flat.sharded]
        sums = [int(w.view(torch.int64).sum()) for w in flats if w.numel()]
        return f"{sum(sums) % 2**64:016x}" if sums else ""

    def close(self) -> None:
        """Take the hooks off the module, remove files. At stage 3 parameters stay sharded."""
        self._checkpoints.close()
        self._parts.arrivals.close()
        self._stage.close()
        self._parts.shelf.close()
        self.comm.close()

    def __enter__(self) -> "ZeroEngine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def ledger(self) -> Ledger:
        """The transfers of this rank."""
        return self.comm.ledger

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer: schedulers attach to it; its own step() raises."""
        return self._parts.optimizer.torch_optimizer

    @property
    def layouts(self) -> tuple[FlatLayout, ...]:
        """The flats as integers, for theory."""
        return tuple(flat.layout for flat in self._parts.flats)

    @property
    def shard_index(self) -> int:
        """Which shard of each flat this rank owns."""
        return self.comm.rank(data_axis(self.zero.stage, self.comm))

    @property
    def carrier(self) -> Carrier:
        """How gradients travel between data ranks."""
        return self.comm.carrier(data_axis(self.zero.stage, self.comm))

    @property
    def unit_uses(self) -> Mapping[str, Uses]:
        """How often each unit is gathered in one forward and backward, as far as they have told."""
        parts = self._parts
        return build.count_uses(self.module, parts.units, parts.flats, parts.called)

    def _judge(self, window: Window) -> bool:
        """Whether to apply the step; raise where the policy says so."""
        if window.finite or (self._on_nonfinite == "ignore" and not self._loss_scale.is_dynamic):
            self._loss_scale.applied()
            return True
        if self._loss_scale.is_dynamic:
            self._loss_scale.overflowed()
            return False
        if self._on_nonfinite == "skip":
            return False
        self._window.clear()
        raise NonFiniteGradientError(
            "the gradient holds NaN or infinity; weights are unchanged and the window is dropped. "
            "Set engine.on_nonfinite=skip to skip such steps on all ranks"
        )

    def _scale(self, clip: torch.Tensor, window: Window, loss_scale: float) -> None:
        weight = window.weight * loss_scale
        clips = self._max_grad_norm is not None and not window.norm <= self._max_grad_norm
        if weight == 1.0 and not clips:
            return
        for flat in self._trained:
            gradient = self._stage.gradient(flat)
            gradient.mul_((clip / weight).to(gradient.device, gradient.dtype))


def _communicator(module: nn.Module, mesh: DeviceMesh | Communicator | None) -> Communicator:
    if not isinstance(mesh, Communicator):
        if mesh is None:
            kinds = {p.device.type for p in module.parameters()} - {"meta"}
            has_cuda = "cuda" in kinds or (not kinds and torch.cuda.is_available())
            mesh = default_mesh("cuda" if has_cuda else "cpu")
        mesh = Communicator(mesh, store=current_store())
    return mesh
