"""ZeroEngine: forward, backward, step. It ties a stage, the optimizer and the norm to a module."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rayzero.dist.comm import Communicator
from rayzero.dist.ledger import Ledger
from rayzero.dist.mesh import default_mesh
from rayzero.dist.process import current_store
from rayzero.engine import holdings, whole
from rayzero.engine.arrivals import check_trained_flags
from rayzero.engine.assembly import Choices, assemble
from rayzero.engine.build import GroupsFactory
from rayzero.engine.flats import Flat
from rayzero.engine.loss_scale import LossScale
from rayzero.engine.norm import Window, agree, clip_factor, square_sums
from rayzero.engine.optimizer import OptimizerFactory
from rayzero.engine.options import OffloadOptions, PrecisionOptions, ZeroOptions
from rayzero.engine.stage import data_axis
from rayzero.engine.values import Initializer
from rayzero.errors import ConfigError, EngineError, NonFiniteGradientError
from rayzero.layout.spec import FlatLayout, TpShard
from rayzero.records import Holdings, Kind, Phase, StepReport

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
        self._stage = self._parts.stage
        self._trained = self._parts.trained
        self._in_window = False
        self._last = True
        self._weight, self._num_backwards, self._num_reductions = 0.0, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        self._open_window()
        self._stage.start_forward()
        trains = self.module.training and torch.is_grad_enabled()
        with self.ledger.during(Phase.FORWARD if trains else Phase.EVAL):
            output = self.module(*args, **kwargs)
            self._stage.end_forward()
        return output

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
        self._open_window()
        self._last = last
        arrivals = self._parts.arrivals
        arrivals.begin(final=self._stage.grads_final, ready=self._collect)
        self._stage.start_backward()
        try:
            with self.ledger.during(Phase.BACKWARD):
                factor = weight * self._loss_scale.value
                weighted = loss if factor == 1.0 else loss * factor
                weighted.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
                arrivals.end()
        finally:
            arrivals.close_backward()
            self._stage.end_backward()
        check_trained_flags(self._trained, trained=True)
        check_trained_flags(self._parts.frozen, trained=False)
        self._weight += weight
        self._num_backwards += 1
        self._num_reductions += last

    def step(self) -> StepReport:
        """Apply the window's gradient and end the window; raise EngineError if there is none."""
        self._check_window()
        with self.ledger.during(Phase.BACKWARD):
            self._stage.finish()
        with self.ledger.during(Phase.STEP), torch.no_grad():
            window, scale = self._agree(), self._loss_scale.value
            applied = self._judge(window)
            clip = clip_factor(window.grad_norm, self._max_grad_norm)
            if applied:
                self._scale(clip, window.weight * scale)
                self._parts.optimizer.update([self._stage.gradient(f) for f in self._trained])
                self._stage.publish()
        report = StepReport(
            applied=applied,
            grad_norm=window.grad_norm,
            clip_factor=clip,
            loss_scale=scale,
            num_backwards=self._num_backwards,
        )
        self._end_window()
        return report

    def zero_grad(self) -> None:
        """Abandon the window: forget its gradients. All ranks must do the same."""
        for flat in self._trained:
            flat.take_gradients()
        self._parts.arrivals.saw_outside_backward = False
        self._end_window()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the window's gradient; the norm that step() reports follows."""
        with self.ledger.during(Phase.BACKWARD), torch.no_grad():
            self._stage.finish()
            for flat in self._trained:
                self._stage.gradient(flat).mul_(factor)

    def full_gradients(self, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
        """Return the window's averaged gradients whole, by name, on rank 0 (else empty) or all."""
        with self.ledger.during(Phase.CONTROL), torch.no_grad():
            self._stage.finish()
            pairs = [(f, self._stage.gradient(f)) for f in self._trained]
            tensors = whole.full_tensors(pairs, self.comm, keep=all_ranks or self._is_first)
        divisor = (self._weight or 1.0) * self._loss_scale.value
        return {name: tensor / divisor for name, tensor in tensors.items()}

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
        """Return full weights and buffers by the module's names, on rank 0 (else empty) or all."""
        with self.ledger.during(Phase.CONTROL), torch.no_grad():
            return whole.full_weights(self._parts, keep=all_ranks or self._is_first)

    @contextlib.contextmanager
    def gathered(
        self, what: nn.Module | Sequence[nn.Parameter], *, writer_rank: int | None = None
    ) -> Iterator[None]:
        """Hold full weights inside the block. What is written there survives only with a writer.

        writer_rank: place on the shard axis of the rank whose values all ranks take over.
        """
        parameters = list(what.parameters()) if isinstance(what, nn.Module) else list(what)
        with (
            self.ledger.during(Phase.CONTROL),
            whole.gathered(self._parts, parameters, writer_rank),
        ):
            yield

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

    def held_by_kind(self) -> list[tuple[Kind, torch.Tensor]]:
        """List them with their kind."""
        return [(kind, t) for kind, _, _, t in holdings.held_tensors(self._parts)]

    def weights_checksum(self) -> str:
        """Sum up the weights this rank holds whole; equal on all data ranks, empty at stage 3."""
        flats = [flat.whole for flat in self._parts.flats if not flat.sharded]
        sums = [int(w.view(torch.int64).sum()) for w in flats if w.numel()]
        return f"{sum(sums) % 2**64:016x}" if sums else ""

    def close(self) -> None:
        """Take the hooks off the module. At stage 3 its parameters stay sharded."""
        self._parts.arrivals.close()
        self._stage.close()
        self._parts.optimizer.close()
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
    def unit_uses(self) -> Mapping[str, int]:
        """How many modules use each unit in one forward."""
        return self._parts.unit_uses

    @property
    def _is_first(self) -> bool:
        return all(self.comm.rank(axis) == 0 for axis in ("replicate", "shard", "tp"))

    def _collect(self, flat: Flat) -> None:
        with torch.no_grad():
            self._stage.collect(flat, last=self._last)

    def _agree(self) -> Window:
        """Learn what all ranks know of the window; reduce what came late and ask again."""
        window = self._ask()
        if window.late:
            self._last = True
            with self.ledger.during(Phase.BACKWARD):
                for flat in self._trained:
                    self._collect(flat)
                self._stage.finish()
            window = self._ask()
        return window

    def _ask(self) -> Window:
        gradients = [self._stage.gradient(f) for f in self._trained]
        late = bool(self._parts.arrivals.late_flats())
        is_double = any(flat.dtypes.master == "fp64" for flat in self._trained)
        return agree(
            self.comm,
            square_sums(self._trained, gradients, self._parts.device),
            axis=data_axis(self.zero.stage, self.comm),
            weight=self._weight,
            loss_scale=self._loss_scale.value,
            counts=(self._num_backwards, self._num_reductions, int(late)),
            norm_dtype=torch.float64 if is_double else torch.float32,
        )

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
        self._end_window()
        raise NonFiniteGradientError(
            "the gradient holds NaN or infinity; weights are unchanged and the window is dropped. "
            "Set engine.on_nonfinite=skip to skip such steps on all ranks"
        )

    def _scale(self, clip: torch.Tensor, weight: float) -> None:
        if self._max_grad_norm is None and weight == 1.0:
            return
        for flat in self._trained:
            gradient = self._stage.gradient(flat)
            gradient.mul_((clip / weight).to(gradient.dtype))

    def _open_window(self) -> None:
        if not self._in_window:
            self.ledger.begin_window()
            self._in_window = True

    def _check_window(self) -> None:
        if self._parts.arrivals.saw_outside_backward:
            raise EngineError(
                "a backward did not go through the engine: call engine.backward(loss), not "
                "loss.backward(); call engine.zero_grad() to drop these gradients"
            )
        if not self._num_backwards:
            raise EngineError("step() without a backward in this window; call engine.backward")

    def _end_window(self) -> None:
        self._stage.clear()
        self._weight, self._num_backwards, self._num_reductions = 0.0, 0, 0
        self._in_window = False


def _communicator(module: nn.Module, mesh: DeviceMesh | Communicator | None) -> Communicator:
    if not isinstance(mesh, Communicator):
        if mesh is None:
            kinds = {p.device.type for p in module.parameters()} - {"meta"}
            has_cuda = "cuda" in kinds or (not kinds and torch.cuda.is_available())
            mesh = default_mesh("cuda" if has_cuda else "cpu")
        mesh = Communicator(mesh, store=current_store())
    return mesh
