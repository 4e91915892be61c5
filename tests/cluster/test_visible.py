"""The device index comes from what a process sees, never from a local rank."""

import pytest

from rayzero.cluster.visible import device_index, visible_devices
from rayzero.errors import ClusterError


@pytest.mark.parametrize(
    ("gpu_id", "variable", "index"),
    [
        ("3", "3", 0),
        ("2", "2,3", 0),
        ("3", "2,3", 1),
        ("5", None, 5),
        ("GPU-b", "GPU-a,GPU-b", 1),
        ("7", " 6 , 7 ", 1),
    ],
)
def test_device_index_counts_among_the_visible(
    gpu_id: str, variable: str | None, index: int
) -> None:
    assert device_index(gpu_id, visible_devices(variable)) == index


@pytest.mark.parametrize(("gpu_id", "variable"), [("1", "0"), ("1", ""), ("GPU-a", None)])
def test_a_gpu_that_cannot_be_seen_is_an_error(gpu_id: str, variable: str | None) -> None:
    with pytest.raises(ClusterError, match="CUDA_VISIBLE_DEVICES"):
        device_index(gpu_id, visible_devices(variable))
