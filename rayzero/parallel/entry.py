"""One entry for several column-cut linears that read the same tensor.

Query, key and value share one all-reduce (or, with sequence parallelism, two all-gathers and one
reduce-scatter). Whether two linears read the same is seen as they run, by the tensor's identity: so
any module's linears may share, and those that read different tensors never do.

    forward     x --_Enter--> whole --_Linear--> q     kept for backward: x, and nothing of whole
                                    --_Linear--> k
                                    --_Linear--> v
    backward    _Linear, three times: a part of the gradient of whole
                _Enter: the gradients of the three weights, and that of x

[Note: what hides the transfers]
The first _Linear in backward begins to gather x again, as Megatron-LM does (Korthikanti et al.,
arXiv:2205.05198, section 4.2.2), while all of them compute the gradient of whole from their
weights. It is complete when autograd comes to _Enter, which begins to sum it over the ranks and
meanwhile computes the weights' gradients from what was gathered. So _Enter is the one that autograd
gives the weights to; it runs in every backward in which any _Linear ran.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayzero.parallel.region import Coming
from rayzero.parallel.stream import Stream


class Reader(Protocol):
    """A linear that reads through an entry."""

    @property
    def weight(self) -> Tensor:
        """The parameter, whole or this rank's block."""

    @property
    def bias(self) -> Tensor | None:
        """Likewise, if there is one."""

    def rows(self, parameter: Tensor) -> Tensor:
        """Return the weight's or bias' rows that this rank computes with."""

    def gradients(self, of_rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients of the parameters whose rows have these."""


class SharedEntry:
    """The entry of the column-cut linears below one module."""

    def __init__(self, stream: Stream, unit: str, *, overlap: bool) -> None:
        self._stream = stream
        self._unit = unit
        self._overlap = overlap
        self._readers: list[weakref.ref[Reader]] = []
        self._seen: weakref.ref[Tensor] | None = None
        self._reading: Reading | None = None
        self._whole: Tensor | None = None

    def add(self, reader: Reader) -> None:
        """Let one more linear's input come through here."""
        self._readers.append(weakref.ref(reader))

    def read(self, x: Tensor, reader: Reader) -> Tensor:
        """Return the linear of the whole x."""
        reading, whole = self._reading, self._whole
        is_seen = self._seen is not None and self._seen() is x
        if reading is None or whole is None or not is_seen or reading.was_read_by(reader):
            readers = [alive for ref in self._readers if (alive := ref()) is not None]
            reading = Reading(self, readers, needs_grad=x.requires_grad)
            whole = _Enter.apply(x, reading, *reading.parameters())  # type: ignore[no-untyped-call]
        result = reading.linear(x, whole, reader)
        # After its last reader nothing here keeps the tensor alive.
        is_over = reading.is_over
        self._seen = None if is_over else weakref.ref(x)
        self._reading, self._whole = (None, None) if is_over else (reading, whole)
        return result

    def begin_whole(self, x: Tensor, *, again: bool = False) -> Coming:
        """Begin to make x whole: for forward, or once more in backward."""
        unit = f"{self._unit}.again" if again else self._unit
        return self._begun(self._stream.begin_whole(x, unit))

    def begin_sum(self, grad: Tensor) -> Coming:
        """Begin to sum a gradient of the whole over the ranks: that of x."""
        return self._begun(self._stream.begin_sum(grad, self._unit))

    def _begun(self, coming: Coming) -> Coming:
        if not self._overlap:
            coming.wait()
        return coming


class Reading:
    """One tensor, the linears that read it, and what they leave to each other in backward."""

    def __init__(self, entry: SharedEntry, readers: Sequence[Reader], *, needs_grad: bool) -> None:
        self.entry = entry
        self.needs_grad = needs_grad
        """Whether x does."""
        self._readers = readers
        self._was_read = [False] * len(readers)
        self._needs_whole = any(reader.weight.requires_grad for reader in readers)
        self._whole: Coming | None = None
        self._grads: dict[int, Tensor] = {}

    def parameters(self) -> Iterator[Tensor | None]:
        """Yield each linear's weight and bias."""
        for reader in self._readers:
            yield reader.weight
            yield reader.bias

    def was_read_by(self, reader: Reader) -> bool:
        """Whether the linear has read this tensor."""
        return self._was_read[self._place(reader)]

    @property
    def is_over(self) -> bool:
        """Whether all linears have read it."""
        return all(self._was_read)

    def linear(self, x: Tensor, whole: Tensor, reader: Reader) -> Tensor:
        """Return this rank's outputs. x is what is kept for backward."""
        place = self._place(reader)
        self._was_read[place] = True
        weight = reader.rows(reader.weight.detach())
        bias = None if reader.bias is None else reader.rows(reader.bias.detach())
        result: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            whole, x.detach(), weight, bias, self, place
        )
        return result

    def begin_again(self, x: Tensor) -> None:
        """Begin to make x whole, once in a backward."""
        if self._whole is None and self._needs_whole:
            self._whole = self.entry.begin_whole(x, again=True)

    def leave_grad(self, place: int, grad: Tensor) -> None:
        """Leave the gradient of a linear's outputs."""
        self._grads[place] = grad

    def gradients(self, needed: Sequence[bool]) -> Iterator[Tensor | None]:
        """Yield the parameters' gradients in their order, None where none is needed; end it."""
        whole = None if self._whole is None else _rows(self._whole.wait())
        self._whole = None
        for place, reader in enumerate(self._readers):
            grad = self._grads.pop(place, None)
            needs_weight, needs_bias = needed[2 * place : 2 * place + 2]
            if grad is None or not (needs_weight or needs_bias):
                yield from (None, None)
                continue
            grad_NO, of_rows = _rows(grad), []
            if needs_weight:
                assert whole is not None
                of_rows.append(grad_NO.t() @ whole.to(grad.dtype))
            if needs_bias:
                of_rows.append(grad_NO.sum(0))
            found = iter(reader.gradients(of_rows))
            yield from (next(found) if needs else None for needs in (needs_weight, needs_bias))

    def _place(self, reader: Reader) -> int:
        return next(place for place, known in enumerate(self._readers) if known is reader)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reading: Reading, *_: Tensor | None) -> Tensor:
        ctx.reading = reading
        ctx.set_materialize_grads(False)
        whole = reading.entry.begin_whole(x).wait()
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        reading: Reading = ctx.reading
        coming = None if grads[0] is None else reading.entry.begin_sum(grads[0])
        gradients = tuple(reading.gradients(ctx.needs_input_grad[2:]))
        return (None if coming is None else coming.wait(), None, *gradients)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        reading: Reading,
        place: int,
    ) -> Tensor:
        ctx.reading, ctx.place = reading, place
        ctx.save_for_backward(x, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        reading: Reading = ctx.reading
        reading.begin_again(x)
        reading.leave_grad(ctx.place, grads[0])
        part = grads[0] @ weight.to(grads[0].dtype) if reading.needs_grad else None
        return part, None, None, None, None, None


def _rows(tensor: Tensor) -> Tensor:
    """Flatten all dims but the last."""
    return tensor.reshape(-1, tensor.shape[-1])


def unit_of_entry(name: str) -> str:
    """Name the entry of a linear: the module around it, or itself where that is the model."""
    return name.rpartition(".")[0] or name
