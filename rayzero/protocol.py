"""The verbs every engine has, ours and the peers': what the trainer calls."""

from collections.abc import Mapping
from typing import Any, Protocol

from rayzero.records import Holdings, StepReport


class Engine(Protocol):
    """Forward, backward, step. One window is any number of backwards and one step."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""

    def backward(self, loss: Any, *, last: bool = True, weight: float = 1.0) -> None:
        """Add one micro-batch's gradient to the window; last=False promises another one."""

    def step(self) -> StepReport:
        """Apply the window's gradient sum(w g)/sum(w) and end the window."""

    def train(self) -> None:
        """Put the module in training mode."""

    def eval(self) -> None:
        """Put the module in evaluation mode."""

    def holdings(self) -> Holdings:
        """Return the bytes this rank holds now, by kind and place."""

    def full_state_dict(self, *, all_ranks: bool = False) -> Mapping[str, Any]:
        """Return full tensors by the module's own names, on rank 0 or on all ranks."""

    def close(self) -> None:
        """Take the hooks off the module and free what the engine holds."""
