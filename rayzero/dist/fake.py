"""One rank of a world that does not exist: torch's fake process group and tensors without values.

The only file that touches torch's private modules for it; tests/dist/test_fake.py says which torch
versions they were seen in.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""What a computation raises that asks a tensor without values for one."""


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
    with FakeTensorMode():
        yield


@contextlib.contextmanager
def with_values() -> Iterator[None]:
    """Give the tensors made inside the block values again, also in a dry run."""
    with unset_fake_temporarily():
        yield


def is_without_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made inside without_values."""
    return isinstance(tensor, FakeTensor)
