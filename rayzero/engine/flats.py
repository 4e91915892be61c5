"""A flat in memory: one buffer, the parameters that are views into it, and this rank's shard."""

from dataclasses import dataclass

import torch
from torch import nn

from rayzero.dist.dtypes import BY_NAME
from rayzero.dist.fake import is_without_values
from rayzero.engine.sharded_parameter import sharded_class
from rayzero.engine.shelf import StagedFile
from rayzero.layout.dtypes import FlatDtypes
from rayzero.layout.spec import FlatLayout
from rayzero.records import Where


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One parameter of a flat, and the class it has while sharded."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    whole_class: type[nn.Parameter]
    sharded_class: type[nn.Parameter]


class Flat:
    """One flat of one rank.

    `whole` holds all parameters of the flat, padded; `shard` this rank's part of it. Where
    parameters stay whole (stages 0-2) shard is a view of whole; where they are sharded (stage 3) it
    is a tensor of its own, on the host if it is offloaded, and the storage of whole has no bytes
    between uses. With a file it is a buffer that flats share: `fetch` before reading, `store` after
    writing.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: dict[str, nn.Parameter],
        *,
        dtypes: FlatDtypes,
        shard_index: int,
        device: torch.device,
        sharded: bool,
        where: Where = Where.DEVICE,
        file: StagedFile | None = None,
    ) -> None:
        self.layout = layout
        self.dtypes = dtypes
        self.shard_index = shard_index
        self.sharded = sharded
        dtype = BY_NAME[dtypes.params]
        self.whole = torch.zeros(layout.padded, dtype=dtype, device=device)
        span = layout.shard(shard_index)
        own = self.whole[span.start : span.stop]
        self.where = where
        self.file = file
        if file is not None:
            self.shard = file.buffer
        else:
            self.shard = torch.zeros_like(own) if sharded else own
            self.shard = to_host(self.shard) if where is Where.HOST else self.shard
        self.members = [
            _member(slot.spec.name, parameters[slot.spec.name]) for slot in layout.slots
        ]
        self._views = self.views_of(self.whole)
        self._placeholder = torch.full((), float("nan"), dtype=dtype, device=device)
        self.make_whole()
        self._versions = self._read_versions()
        if sharded:
            self.free()

    def views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Cut a buffer of this flat's length into tensors of the parameters' shapes."""
        slots = self.layout.slots
        sizes = [slot.span.elements for slot in slots]
        parts = buffer[: self.layout.numel].split_with_sizes(sizes)
        return [part.view(slot.spec.shape) for part, slot in zip(parts, slots, strict=True)]

    def own(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a buffer of this flat's length."""
        span = self.layout.shard(self.shard_index)
        return buffer[span.start : span.stop]

    def fetch(self) -> torch.Tensor:
        """Return the shard with its values; one from a file is valid until the next fetch."""
        if self.file is not None:
            self.file.fetch()
        return self.shard

    def store(self) -> None:
        """Write the shard to its file, if it has one."""
        if self.file is not None:
            self.file.store()

    def make_whole(self) -> None:
        """Point the parameters at `whole`; give it bytes first if it has none."""
        self.allocate()
        for member, view in zip(self.members, self._views, strict=True):
            member.parameter.__class__ = member.whole_class
            member.parameter.data = view

    def allocate(self) -> None:
        """Give `whole` its bytes if it has none; what they hold is undefined."""
        storage = self.whole.untyped_storage()
        if storage.nbytes() == 0 and self.layout.padded:
            storage.resize_(self.layout.padded * self.whole.itemsize)

    def free(self) -> None:
        """Take the bytes of `whole` away; its parameters refuse to be used until make_whole."""
        for member in self.members:
            # What was gathered ahead and not used has parameters that are sharded yet.
            if type(member.parameter) is not member.sharded_class:
                member.parameter.data = self._placeholder.expand(member.shape)
                member.parameter.__class__ = member.sharded_class
        self.whole.untyped_storage().resize_(0)

    def take_written(self) -> list[str]:
        """Name the parameters that were written in place since the last call."""
        before, self._versions = self._versions, self._read_versions()
        changed = zip(self.members, before, self._versions, strict=True)
        return [member.name for member, old, new in changed if old != new]

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Return the parameters' gradients as dense ones, None where none came, and clear them."""
        grads: list[torch.Tensor | None] = []
        for member in self.members:
            grad = member.parameter.grad
            grads.append(grad.to_dense() if grad is not None and grad.is_sparse else grad)
            member.parameter.grad = None
        return grads

    def moved(self) -> list[tuple[Member, torch.Tensor]]:
        """List the parameters that should be views into `whole` and are not, with their view."""
        if is_without_values(self.whole):
            return []
        return [
            (member, view)
            for member, view in zip(self.members, self._views, strict=True)
            if type(member.parameter) is not member.sharded_class
            and member.parameter.data_ptr() != view.data_ptr()
        ]

    def bring_back(self) -> None:
        """Copy the values of such parameters into `whole`, and make them views again."""
        for member, view in self.moved():
            view.copy_(member.parameter.data)
            member.parameter.data = view

    @property
    def num_writes(self) -> int:
        """How often users wrote into parameters in place; sharded ones cannot be written."""
        return 0 if self.sharded else sum(self._read_versions())

    def _read_versions(self) -> list[int]:
        return [member.parameter._version for member in self.members]

    @property
    def placeholder(self) -> torch.Tensor:
        """The scalar that sharded parameters are expanded from."""
        return self._placeholder


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory, pinned where there is a CUDA device to copy to and from."""
    host = tensor.to("cpu")
    return host.pin_memory() if torch.cuda.is_available() and host.numel() else host


def _member(name: str, parameter: nn.Parameter) -> Member:
    return Member(
        name=name,
        parameter=parameter,
        shape=tuple(parameter.shape),
        whole_class=type(parameter),
        sharded_class=sharded_class(type(parameter), name),
    )
