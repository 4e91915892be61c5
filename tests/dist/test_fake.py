"""A world without ranks and tensors without memory, by torch's private modules."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rayzero.dist.comm import Communicator
from rayzero.dist.fake import (
    IN_PLACE,
    NEEDS_VALUES,
    PRODUCTS,
    VIEWS,
    Sizes,
    fake_world,
    is_without_values,
    with_values,
    without_values,
)
from rayzero.dist.mesh import build_mesh
from rayzero.records import Carrier

SEEN_WITH = ("2.11", "2.12", "2.13", "2.14")
"""Versions of torch whose private names dist/fake.py uses."""


def test_this_torch_is_one_whose_private_modules_are_known() -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    assert version in SEEN_WITH, f"look at rayzero/dist/fake.py with torch {version}"


def test_a_fake_rank_knows_its_place_and_its_collectives_return_at_once() -> None:
    with fake_world(world=1024, rank=77):
        comm = Communicator(build_mesh("cpu", replicate=2, shard=128, tp=4))
        assert [comm.rank(axis) for axis in ("replicate", "shard", "tp")] == [0, 19, 1]
        assert comm.is_fake
        assert comm.carrier("shard") is Carrier.NATIVE
        with without_values():
            flat = torch.zeros(128 * 10**9)
            comm.all_gather(flat, axis="shard", unit="all").wait()
        assert comm.ledger.total_sent_bytes == 127 * 4 * 10**9
    assert not dist.is_initialized()


def column_major() -> Tensor:
    """A matrix whose columns lie together in a larger buffer."""
    return torch.empty(100)[7:79].view(12, 6).t()


SHORT: dict[Callable[..., object], tuple[object, ...]] = dict(
    zip(
        (*VIEWS, *IN_PLACE, *PRODUCTS),
        [
            (column_major,),
            (column_major, [2, 3, 12]),
            (column_major, [5, -1, -1]),
            (column_major,),
            (column_major, -1, 0),
            (column_major, 1, 2, 12, 3),
            (column_major, 1, -2),
            (column_major, [1, 2, 3]),
            (column_major, lambda: torch.empty(12, dtype=torch.bfloat16)),
            (column_major,),
            (column_major, 2.0),
            (column_major, lambda: torch.empty(6, 1)),
            (column_major, 3.0),
            (column_major, lambda: torch.empty(12, 5)),
        ],
        strict=True,
    )
)
"""Each operation that Sizes runs itself, with arguments; functions make tensors."""


def described(mode: FakeTensorMode, operation: Callable[..., object]) -> list[object]:
    """Run an operation; tell everything about its results, and which share the input's storage."""
    with mode:
        made = [make() if callable(make) else make for make in SHORT[operation]]
        result = operation(*made)
        parts = result if isinstance(result, list | tuple) else [result]
        first = made[0]
        assert isinstance(first, Tensor)
        return [
            (
                type(part),
                part.shape,
                part.stride(),
                part.storage_offset(),
                part.dtype,
                part.device,
                part.untyped_storage().nbytes(),
                part.untyped_storage()._cdata == first.untyped_storage()._cdata,
                part is first,
                part._is_view(),
                part._version,
            )
            for part in parts
        ]


@pytest.mark.parametrize("operation", SHORT, ids=str)
def test_the_short_way_ends_where_torchs_own_does(operation: Callable[..., object]) -> None:
    assert described(Sizes(), operation) == described(FakeTensorMode(), operation)


def test_the_short_way_refuses_sizes_that_do_not_fit() -> None:
    with without_values():
        with pytest.raises(RuntimeError, match="12"):
            torch.empty(12).copy_(torch.empty(5))
        with pytest.raises(RuntimeError, match="12"):
            torch.empty(3, 12).mm(torch.empty(5, 3))


def test_values_come_back_inside_with_values() -> None:
    with without_values():
        assert is_without_values(torch.ones(3))
        with with_values():
            assert torch.ones(3).sum().item() == 3.0
        with pytest.raises(NEEDS_VALUES):
            torch.ones(3).sum().item()


def test_a_dry_run_does_not_start_beside_a_process_group() -> None:
    with (
        fake_world(world=2, rank=0),
        pytest.raises(AssertionError, match="process group"),
        fake_world(world=2, rank=0),
    ):
        pass
