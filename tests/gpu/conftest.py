"""Pools of ranks on each kind of device; what a machine lacks is skipped with the reason."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ranks import Pools

SHARING_NCCL = (2, 30)
"""From this version on, several ranks may use one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1)."""


@pytest.fixture(
    scope="session", params=[pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def pools(request: Any) -> Iterator[Pools]:
    """Return pools of ranks of a device: pools(1)(function, *args)."""
    yield from _pools(request.param)


@pytest.fixture(scope="session", params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def cuda_pools(request: Any) -> Iterator[Pools]:
    """Return pools of ranks on CUDA, for what other devices do not have."""
    yield from _pools(request.param)


@pytest.fixture
def two_ranks(pools: Pools) -> Pools:
    """Return the pools where two ranks can meet."""
    if pools.device == "cuda" and torch.cuda.device_count() < 2:
        found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if found < SHARING_NCCL:
            pytest.skip(f"two ranks on one GPU need NCCL {SHARING_NCCL}, found {found}")
    return pools


def _pools(device: str) -> Iterator[Pools]:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    pools = Pools(device)
    yield pools
    pools.close()
