"""The ranks of a gang: their processes' environment, their order, their seats around one store."""

import sys
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayzero.cluster.placement import Placement, resources_of
from rayzero.cluster.rank import Rank, Whereabouts
from rayzero.cluster.seating import Seating
from rayzero.cluster.session import Session
from rayzero.cluster.watch import WATCH_GROUP
from rayzero.config.cluster import ClusterConfig, Device
from rayzero.dist.process import Seat
from rayzero.errors import ClusterError

KEPT_BY_RAY = "CUDA_VISIBLE_DEVICES"
RANK_ENVIRONMENT = {
    # Above 32 MiB glibc returns memory at once, and each refill faults fresh pages.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    # The store looks up its client's name; a silent name server would stall it for 5 s.
    "RES_OPTIONS": "timeout:1 attempts:1",
}


def rank_environment(config: ClusterConfig, seating: Seating, session: Session) -> dict[str, str]:
    """Return the variables of the ranks' processes; cluster.env has the last word."""
    if KEPT_BY_RAY in config.env:
        raise ClusterError(
            f"cluster.env.{KEPT_BY_RAY}={config.env[KEPT_BY_RAY]} would hide from a rank the GPU "
            "that Ray gives it; set it where Ray is started, before it starts"
        )
    ours = {**RANK_ENVIRONMENT, "OMP_NUM_THREADS": str(config.threads_per_rank)}
    if seating.device is Device.CPU:
        ours[KEPT_BY_RAY] = ""
    if session.on_this_machine:
        # gloo would look for the address of this machine's name, which need not have one.
        ours["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return {**ours, **config.env}


def start_actors(placement: Placement, seating: Seating, environment: dict[str, str]) -> list[Any]:
    """Start one actor in each place of each bundle; returns at once."""
    actor = ray.remote(max_restarts=0, num_cpus=0, concurrency_groups={WATCH_GROUP: 1})(Rank)
    actors = []
    for index, bundle in enumerate(placement.bundles):
        share = resources_of(bundle.node, 1, seating.device)
        room = PlacementGroupSchedulingStrategy(placement.group, placement_group_bundle_index=index)
        options = actor.options(
            num_gpus=share.pop("GPU", 0),
            resources=share,
            scheduling_strategy=room,
            runtime_env={"env_vars": environment},
        )
        actors += [options.remote() for _ in range(bundle.num_ranks)]
    return actors


def rank_order(found: Sequence[Whereabouts], seating: Seating) -> list[int]:
    """Return the actors' indices by rank: by node in the nodes' order, by device inside a node."""
    nodes = [node.node_id for node in seating.nodes]
    return sorted(
        range(len(found)),
        key=lambda i: (nodes.index(found[i].node_id), _number(found[i].gpu_id), found[i].gpu_id, i),
    )


def seats_of(
    whereabouts: Sequence[Whereabouts], seating: Seating, config: ClusterConfig, port: int
) -> tuple[Seat, ...]:
    """Seat the ranks around the store of rank 0."""
    names = {node.node_id: node.name for node in seating.nodes}
    return tuple(
        Seat(
            rank=rank,
            world=len(whereabouts),
            node=names[found.node_id],
            device=found.device,
            store_host=whereabouts[0].address,
            store_port=port,
            threads=config.threads_per_rank,
        )
        for rank, found in enumerate(whereabouts)
    )


def names_of(whereabouts: Sequence[Whereabouts], seating: Seating) -> list[str]:
    """Name the ranks for messages."""
    if not whereabouts:
        return [f"process {index}" for index in range(seating.world)]
    nodes = {node.node_id: node.name for node in seating.nodes}
    return [
        f"rank {rank} ({nodes[found.node_id]}, {found.device}, pid {found.pid})"
        for rank, found in enumerate(whereabouts)
    ]


def check_distinct(whereabouts: Sequence[Whereabouts]) -> None:
    """Raise ClusterError if two ranks were given one GPU."""
    owners: dict[str, Whereabouts] = {}
    for found in whereabouts:
        other = owners.setdefault(found.uuid, found)
        if found.uuid and other is not found:
            raise ClusterError(
                f"processes {other.pid} and {found.pid} were both given GPU {found.uuid} (Ray's "
                f"ids {other.gpu_id} and {found.gpu_id}, visible {other.visible} and "
                f"{found.visible}); start Ray with the number of GPUs the node has"
            )


def _number(gpu_id: str) -> int:
    return int(gpu_id) if gpu_id.isdigit() else 0
