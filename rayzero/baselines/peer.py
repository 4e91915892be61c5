"""What all peers share: the window, clipping, and the count of what they hold.

A peer averages over ranks by itself; the micro-batches of a window are averaged here, by dividing
each loss, so that the gradient is the engine's: the mean over micro-batches and ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from rayzero.dist.comm import Communicator
from rayzero.dist.ledger import Ledger
from rayzero.errors import EngineError
from rayzero.records import Held, Holdings, Kind, StepReport

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
GroupsFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], list[dict[str, Any]]]


class Peer(Protocol):
    """What one peer does in its own way. A window is some micro-batches and one step."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that schedules attach to."""

    def begin(self, *, last: bool) -> None:
        """Hear, before a forward, whether its backward is the last of the window."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward."""

    def step(self, max_norm: float | None) -> torch.Tensor:
        """Clip, update, drop the gradients; return their norm, NaN where nothing was clipped."""

    def held(self) -> Iterator[tuple[Kind, torch.Tensor]]:
        """Yield the tensors this rank keeps between steps; a peer's own buffers are not visible."""

    def full_state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return full weights by the module's own names, on every rank."""

    def close(self) -> None:
        """Let go of what outlives the objects."""


class PeerEngine:
    """A peer with the engine's verbs. Its traffic is its own and does not enter the ledger.

    accumulation: micro-batches in each window; peers must know it beforehand.
    """

    def __init__(
        self,
        peer: Peer,
        module: nn.Module,
        comm: Communicator,
        *,
        accumulation: int,
        max_grad_norm: float | None,
    ) -> None:
        self.module = module
        self.comm = comm
        self._peer = peer
        self._accumulation = accumulation
        self._max_grad_norm = max_grad_norm
        self._num_backwards = 0
        self._gradients_bytes = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        if self.module.training and torch.is_grad_enabled():
            self.ledger.begin_window()
            self._peer.begin(last=self._is_last)
        return self._peer.forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, last: bool = True, weight: float = 1.0) -> None:
        """Add one micro-batch's gradient; peers weigh all alike."""
        if weight != 1.0:
            raise EngineError(f"weight={weight}: peers average micro-batches alike; use weight=1")
        if last != self._is_last:
            raise EngineError(
                f"backward {self._num_backwards + 1} of a window came with last={last}, but this "
                f"peer was built for {self._accumulation} micro-batches in each window"
            )
        self._peer.backward(loss / self._accumulation if self._accumulation > 1 else loss)
        self._num_backwards += 1

    def step(self) -> StepReport:
        """Apply the window's mean gradient."""
        if self._num_backwards != self._accumulation:
            raise EngineError(
                f"step() after {self._num_backwards} of {self._accumulation} backwards of a window"
            )
        if not self._gradients_bytes:
            self._gradients_bytes = storage_bytes(gradients(self.module.parameters()))
        norm = self._peer.step(self._max_grad_norm)
        self._num_backwards = 0
        limit = float("inf") if self._max_grad_norm is None else self._max_grad_norm
        return StepReport(
            applied=True,
            grad_norm=norm,
            clip_factor=torch.clamp(limit / norm, max=1.0),
            num_backwards=self._accumulation,
        )

    def train(self) -> None:
        """Put the module in training mode."""
        self.module.train()

    def eval(self) -> None:
        """Put the module in evaluation mode."""
        self.module.eval()

    def holdings(self) -> Holdings:
        """Count what the peer keeps, and the gradients as they were before the first step."""
        tensors: dict[Kind, list[torch.Tensor]] = {}
        for kind, tensor in self._peer.held():
            tensors.setdefault(kind, []).append(tensor)
        counted = {kind: storage_bytes(found) for kind, found in tensors.items()}
        counted[Kind.GRADIENTS] = self._gradients_bytes
        return Holdings(entries=tuple(Held(kind=k, num_bytes=n) for k, n in counted.items() if n))

    def held_tensors(self) -> list[torch.Tensor]:
        """List the tensors behind holdings(), gradients aside."""
        return [local(tensor) for _, tensor in self._peer.held()]

    def full_state_dict(self, *, all_ranks: bool = False) -> Mapping[str, torch.Tensor]:
        """Return full weights by name, on rank 0 (else empty) or all."""
        state = self._peer.full_state_dict()
        return state if all_ranks or self.comm.is_first else {}

    def weights_checksum(self) -> str:
        """Return '': peers are held against others by their losses alone."""
        return ""

    def close(self) -> None:
        """End the peer and stop the communicator's watch."""
        self._peer.close()
        self.comm.close()

    def __enter__(self) -> "PeerEngine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def ledger(self) -> Ledger:
        """The transfers of our own door; a peer's do not pass through it."""
        return self.comm.ledger

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that schedules attach to."""
        return self._peer.optimizer

    @property
    def _is_last(self) -> bool:
        return self._num_backwards == self._accumulation - 1


def clip(parameters: Iterable[torch.Tensor], max_norm: float | None) -> torch.Tensor:
    """Clip as torch does; return the norm before, NaN where max_norm is None."""
    if max_norm is None:
        return torch.full((), float("nan"))
    norm: Any = nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def held_by(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Kind, torch.Tensor]]:
    """Yield the tensors of a module and of a torch optimizer's state."""
    yield from ((Kind.PARAMETERS, parameter) for parameter in module.parameters())
    yield from ((Kind.MODULE_BUFFERS, buffer) for buffer in module.buffers())
    yield from optimizer_states(optimizer)


def optimizer_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Kind, torch.Tensor]]:
    """Yield the moments and step counters of an optimizer."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield (Kind.MOMENTS if value.ndim else Kind.COUNTERS), value


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """List the gradients there are."""
    return [p.grad for p in parameters if p.grad is not None]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bytes of distinct storages."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in map(local, tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank holds, or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    found: torch.Tensor = to_local() if to_local is not None else tensor
    return found
