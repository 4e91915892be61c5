"""A world without ranks and tensors without memory, by torch's private modules."""

import pytest
import torch
import torch.distributed as dist

from rayzero.dist.comm import Communicator
from rayzero.dist.fake import (
    NEEDS_VALUES,
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
