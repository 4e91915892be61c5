"""The device mesh: axes replicate x shard x tp over all ranks, tp innermost."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("replicate", "shard", "tp")


def build_mesh(device_type: str, *, replicate: int, shard: int, tp: int) -> DeviceMesh:
    """Lay the ranks of the default group out; ranks of one tp group are neighbours."""
    return init_device_mesh(device_type, (replicate, shard, tp), mesh_dim_names=AXES)


def default_mesh(device_type: str) -> DeviceMesh:
    """Put all ranks on the shard axis."""
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
