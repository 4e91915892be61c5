"""The window that is open: what backwards have added since the last step, until all ranks agree."""

import torch

from rayzero.engine.arrivals import check_known, check_memory, check_trained_flags
from rayzero.engine.assembly import Assembly
from rayzero.engine.flats import Flat
from rayzero.engine.loss_scale import LossScale
from rayzero.engine.norm import Window, agree, square_sums
from rayzero.engine.stage import data_axis
from rayzero.errors import EngineError
from rayzero.records import Phase


class OpenWindow:
    """Backwards since the last step."""

    def __init__(self, parts: Assembly, loss_scale: LossScale, *, stage: int) -> None:
        self._parts = parts
        self._loss_scale = loss_scale
        self._axis = data_axis(stage, parts.comm)
        is_double = any(flat.dtypes.master == "fp64" for flat in parts.trained)
        self._norm_dtype = torch.float64 if is_double else torch.float32
        self._is_open = False
        self._last = True
        self._weight, self._num_reductions = 0.0, 0
        self.num_backwards = 0

    def open(self, *, stays_open: bool = True) -> None:
        """Begin a window, and its page in the ledger, unless one is open."""
        if not self._is_open:
            self._parts.comm.ledger.begin_window()
            self._is_open = stays_open

    def backward(self, loss: torch.Tensor, *, last: bool, weight: float, retain: bool) -> None:
        """Add one weighted micro-batch's gradient."""
        arrivals, stage = self._parts.arrivals, self._parts.stage
        self.open()
        self._last = last
        arrivals.begin(ready=self._collect)
        stage.start_backward()
        try:
            with self._parts.comm.ledger.during(Phase.BACKWARD):
                factor = weight * self._loss_scale.value
                weighted = loss if factor == 1.0 else loss * factor
                weighted.backward(retain_graph=retain)  # type: ignore[no-untyped-call]
                arrivals.end()
        finally:
            arrivals.close_backward()
            stage.end_backward()
        check_trained_flags(self._parts.trained, trained=True)
        check_trained_flags(self._parts.frozen, trained=False)
        self._weight += weight
        self.num_backwards += 1
        self._num_reductions += last

    def settle(self) -> Window:
        """Reduce all that came, and learn what all ranks know of it; reduce what came late, too."""
        self._check()
        ledger = self._parts.comm.ledger
        with ledger.during(Phase.BACKWARD):
            self._parts.stage.finish()
        with ledger.during(Phase.STEP), torch.no_grad():
            agreed = self._agree()
        if agreed.late:
            self._last = True
            with ledger.during(Phase.BACKWARD):
                for flat in self._parts.trained:
                    self._collect(flat)
                self._parts.stage.finish()
            with ledger.during(Phase.STEP), torch.no_grad():
                agreed = self._agree()
        return agreed

    def clear(self) -> None:
        """End the window and forget its gradients."""
        for flat in self._parts.trained:
            flat.take_gradients()
        self._parts.arrivals.saw_outside_backward = False
        self._parts.stage.clear()
        self._weight, self._num_reductions = 0.0, 0
        self.num_backwards = 0
        self._is_open = False

    def _collect(self, flat: Flat) -> None:
        with torch.no_grad():
            self._parts.stage.collect(flat, last=self._last)

    def _agree(self) -> Window:
        parts = self._parts
        gradients = [parts.stage.gradient(flat) for flat in parts.trained]
        late = int(bool(parts.arrivals.late_flats()))
        return agree(
            parts.comm,
            square_sums(parts.trained, gradients, parts.device),
            axis=self._axis,
            weight=self._weight,
            loss_scale=self._loss_scale.value,
            counts=(self.num_backwards, self._num_reductions, late),
            norm_dtype=self._norm_dtype,
            flags=parts.optimizer.unlike_sums(),
        )

    def _check(self) -> None:
        if self._parts.arrivals.saw_outside_backward:
            raise EngineError(
                "a backward did not go through the engine: call engine.backward(loss), not "
                "loss.backward(); call engine.zero_grad() to drop these gradients"
            )
        if not self.num_backwards:
            raise EngineError("there was no backward in this window; call engine.backward first")
        check_known(self._parts.module, self._parts.flats)
        check_memory(self._parts.flats)
