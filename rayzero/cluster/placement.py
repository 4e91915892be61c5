"""Reserve room for all ranks at once: one placement group, one bundle per tensor-parallel group.

A bundle never spans nodes, so Ray itself keeps a tensor-parallel group inside one; each bundle
names its node by the node's pin, so every node gets its share of the ranks.
"""

import math
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from rayzero.cluster.inventory import Node
from rayzero.cluster.seating import Seating
from rayzero.config.cell import CellConfig
from rayzero.config.checks import divisors
from rayzero.config.cluster import Device
from rayzero.errors import ClusterError
from rayzero.train.theory import tp_sent_bytes

REMOVAL_S = 5.0
MB, GB = 1e6, 1e9


class PlacementNotice(UserWarning):
    """A placement that works and costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Neighbouring ranks on one node."""

    node: Node
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Reserved room; `group` is Ray's placement group."""

    group: Any
    bundles: tuple[Bundle, ...]


def bundles_of(seating: Seating, tp: int) -> tuple[Bundle, ...]:
    """Cut each node's ranks into bundles of tp, or of the largest size that fits node and tp."""
    size = math.gcd(seating.ranks_per_node, tp)
    return tuple(
        Bundle(node=node, num_ranks=size)
        for node in seating.nodes
        for _ in range(seating.ranks_per_node // size)
    )


def warning_of(seating: Seating, cell: CellConfig) -> str:
    """Say what a tp degree costs that does not fit in a node; empty where it does.

    Of what a rank sends on the axis tp, the part that goes to ranks of other nodes, for pairs of
    ranks that exchange alike; the time is that of a node's ranks on the node's link, alone on it.
    """
    tp = cell.parallel.tp
    if seating.keeps_inside(tp):
        return ""
    allowed = ", ".join(map(str, divisors(seating.ranks_per_node)))
    text = (
        f"parallel.tp={tp} does not fit in nodes of {seating.ranks_per_node} ranks (these do: "
        f"{allowed}): tensor-parallel traffic crosses the network"
    )
    if cell.model.factory is not None:
        return text
    together = math.gcd(seating.ranks_per_node, tp)
    crossing = Fraction(tp - together, tp - 1) * tp_sent_bytes(cell, seating.world)
    text += f", {float(crossing) / MB:.4g} MB of a rank in each step"
    link_GBps = cell.cluster.hardware.inter_node_GBps
    if link_GBps is None:
        return f"{text}; its time is known where cluster.hardware.inter_node_GBps is given"
    seconds = float(crossing) * seating.ranks_per_node / (link_GBps * GB)
    return f"{text}: at least {seconds:.3g} s per step at {link_GBps:g} GB/s between nodes"


def resources_of(node: Node, num_ranks: int, device: Device) -> dict[str, float]:
    """Return what Ray must reserve for some ranks of a node."""
    reserved = {node.pin: node.pin_share * num_ranks}
    return {**reserved, "GPU": float(num_ranks)} if device is Device.CUDA else reserved


def place(seating: Seating, tp: int, *, timeout_s: float) -> Placement:
    """Reserve all bundles or none; raise ClusterError with asked and free if it takes too long."""
    bundles = bundles_of(seating, tp)
    asked = [resources_of(b.node, b.num_ranks, seating.device) for b in bundles]
    group = placement_group(asked, strategy="PACK")
    placed = False
    try:
        placed = group.wait(timeout_s)
    finally:
        if not placed:
            remove_placement_group(group)
    if not placed:
        raise ClusterError(_busy(asked, timeout_s))
    return Placement(group=group, bundles=bundles)


def release(placement: Placement) -> None:
    """Give the room back and wait, for a bounded time, until Ray says so."""
    remove_placement_group(placement.group)
    deadline = time.monotonic() + REMOVAL_S
    while time.monotonic() < deadline:
        if placement_group_table(placement.group).get("state") in (None, "REMOVED"):
            return
        time.sleep(0.02)


def _busy(asked: list[dict[str, float]], timeout_s: float) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    names = sorted({name for bundle in asked for name in bundle})
    lines = [
        f"{name}: asked {sum(bundle.get(name, 0) for bundle in asked):g}, "
        f"free {free.get(name, 0):g} of {total.get(name, 0):g}"
        for name in names
    ]
    return (
        f"no room for the ranks within cluster.start_timeout_s={timeout_s:g} "
        f"({'; '.join(lines)}); something else uses the cluster, or a node is gone"
    )
