"""One rank of a world that does not exist: torch's fake process group and tensors without values.

The only file that touches torch's private modules for it; tests/dist/test_fake.py says which torch
versions they were seen in.

[Note: the short way]
FakeTensorMode looks every operation up in a cache, by a hash of all there is to know of its
arguments, and asks for a tensor's device by an operation too. For views, writes in place and plain
products, whose sizes C++ tells, that takes three times as long as to run them (measured: 190 us
against 60). Sizes runs these as FakeTensorMode does what is not in its cache, and leaves all others
to it: sizes that torch works out in Python (addmm, add, sum) come sooner from the cache.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""What a computation raises that asks a tensor without values for one."""
_NO_KERNEL = "no fake impl registered"
_NO_MEMORY = ("data pointer", ".numpy() is not supported")
"""What torch writes where a custom operator, or foreign code, meets a tensor without values."""

_DEVICE = torch.ops.prim.device.default
_ATEN = torch.ops.aten
VIEWS = (
    _ATEN.detach.default,
    _ATEN.view.default,
    _ATEN.expand.default,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.split_with_sizes.default,
)
IN_PLACE = (
    _ATEN.copy_.default,
    _ATEN.zero_.default,
    _ATEN.fill_.Scalar,
    _ATEN.add_.Tensor,
    _ATEN.mul_.Tensor,
)
PRODUCTS = (_ATEN.mm.default,)
"""What Sizes runs itself: the cost of a step is in the first."""
_SHORT = frozenset([*VIEWS, *PRODUCTS])
_SHORT_IN_PLACE = frozenset(IN_PLACE)


class Sizes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """FakeTensorMode, sooner. See [Note: the short way]."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nobody compiles here: leave out what would hide each call from torch.compile."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Give the result's sizes."""
        if func is _DEVICE:
            return args[0].device
        is_in_place = func in _SHORT_IN_PLACE
        if (is_in_place or func in _SHORT) and not kwargs and _are_alike(args):
            with in_kernel_invocation_manager(self):
                result = func(*args)
            return args[0] if is_in_place else self._wrapped(result, args[0].fake_device)
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def _wrapped(self, sizes: Any, device: torch.device) -> Any:
        if isinstance(sizes, torch.Tensor):
            return FakeTensor(self, sizes, device)
        return [FakeTensor(self, part, device) for part in sizes]


def _are_alike(args: Sequence[Any]) -> bool:
    """Whether all tensors are plain ones of one device; some have a value, as torch.tensor's do."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    plain = [t for t in tensors if type(t) is FakeTensor and t.constant is None]
    return len(plain) == len(tensors) and len({t.fake_device for t in plain}) == 1


@contextlib.contextmanager
def fake_world(*, world: int, rank: int) -> Iterator[None]:
    """Be rank `rank` of `world` inside the block; collectives return at once and move nothing."""
    assert not dist.is_initialized(), "a dry run needs a process without a process group"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Give tensors made inside the block sizes and storage bytes, but no memory.

    Meshes must be built before.
    """
    with Sizes():
        yield


@contextlib.contextmanager
def with_values() -> Iterator[None]:
    """Give the tensors made inside the block values again, also in a dry run."""
    with unset_fake_temporarily():
        yield


def is_without_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made inside without_values."""
    return isinstance(tensor, FakeTensor)


def why_untraceable(error: RuntimeError) -> str | None:
    """Say what a computation asked for that is not there without values; None: another error."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, UnsupportedOperatorException) or _NO_KERNEL in text:
        operator = getattr(error, "func", text)
        return (
            f"it calls an operator that has no kernel for sizes alone ({operator}); register one "
            "with torch.library.register_fake"
        )
    if any(sign in text for sign in _NO_MEMORY):
        return f"it reads a tensor's memory ({text}); keep to torch's operators in forward"
    if isinstance(error, NEEDS_VALUES):
        return (
            f"it asks a tensor for its value ({text}); keep .item(), .tolist() and tensors in "
            "if-conditions out of forward"
        )
    return None
