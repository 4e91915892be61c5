"""Which device index a rank uses, worked out from what its process can see.

A local rank is not a device index: with one GPU per actor each process sees one device, index 0,
whatever its rank; with every device left visible the index is the GPU's own.
"""

from collections.abc import Sequence

from rayzero.errors import ClusterError


def device_index(gpu_id: str, visible: Sequence[str] | None) -> int:
    """Return the index, in this process, of the GPU that Ray assigned.

    visible: the entries of CUDA_VISIBLE_DEVICES (indices or UUIDs), None where it is not set.
    """
    if visible is None:
        return _whole_number(gpu_id)
    if gpu_id in visible:
        return visible.index(gpu_id)
    raise ClusterError(
        f"Ray assigned GPU {gpu_id} to a rank that sees only CUDA_VISIBLE_DEVICES="
        f"{','.join(visible) or 'none'}; leave CUDA_VISIBLE_DEVICES to Ray in the ranks and set it "
        "before Ray starts on the node instead"
    )


def visible_devices(variable: str | None) -> tuple[str, ...] | None:
    """Split the value of CUDA_VISIBLE_DEVICES; None (not set) means every device is visible."""
    if variable is None:
        return None
    return tuple(entry.strip() for entry in variable.split(",") if entry.strip())


def _whole_number(gpu_id: str) -> int:
    if gpu_id.isdigit():
        return int(gpu_id)
    raise ClusterError(
        f"Ray names a GPU {gpu_id!r} while CUDA_VISIBLE_DEVICES is not set in the rank; "
        "its index cannot be told"
    )
