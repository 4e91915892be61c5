"""One rank of a world that does not exist: torch's fake process group and tensors without values.

The only file that touches torch's private modules for it; tests/dist/test_fake.py says which torch
versions they were seen in.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
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
def without_values() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Let every tensor made inside the block have sizes and storage bytes, but no memory.

    Yields what turns a real tensor into such a one. Meshes must be built before.
    """
    with FakeTensorMode() as mode:
        yield mode.from_tensor
