"""One connection to one Ray cluster: our own, several emulated nodes of ours, or a running one.

Ray allows one connection in a process, so a second session is the first one again, or an error.
"""

import atexit
import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import ray

from rayzero.cluster import foreign
from rayzero.cluster.inventory import (
    FOREIGN_SHARE,
    Inventory,
    Node,
    Survey,
    slots_of,
    sorted_nodes,
    survey,
)
from rayzero.cluster.own import OwnCluster, slot_resource
from rayzero.cluster.seating import Seating, seat
from rayzero.config.cluster import ClusterConfig, ClusterKind, Device
from rayzero.errors import ClusterError


class Session:
    """An open connection; `close` ends what it started and nothing else. Made by open_session."""

    _current: ClassVar["Session | None"] = None
    """Mirrors Ray's own state: one connection in a process."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._own = OwnCluster() if config.kind is not ClusterKind.ADDRESS else None
        self._holders = 1
        atexit.register(self._end)
        try:
            found = survey()
            self._connect(found)
            self.inventory = self._take_inventory(found)
        except BaseException:
            self._end()
            raise
        Session._current = self

    def serves(self, config: ClusterConfig) -> bool:
        """Tell whether a config asks for this very cluster; ranks and environment may differ."""
        return _identity(config) == _identity(self._config)

    def seat(self, config: ClusterConfig) -> Seating:
        """Choose devices and nodes for a config's ranks; raise ClusterError if they are too few."""
        return seat(config, self.inventory)

    def world_size(self, config: ClusterConfig) -> int:
        """Return how many ranks a config has on this cluster."""
        return self.seat(config).world

    def hold(self) -> "Session":
        """Share the session: each holder closes it, the last one ends it."""
        self._holders += 1
        return self

    def close(self) -> None:
        """End the cluster we started, or leave the one we joined."""
        self._holders -= 1
        if self._holders <= 0:
            self._end()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @classmethod
    def current(cls) -> "Session | None":
        """Return the open session of this process."""
        return cls._current

    @property
    def is_open(self) -> bool:
        """Tell whether ranks can be started."""
        return Session._current is self

    @property
    def note(self) -> str:
        """Say which cluster this is."""
        names = ", ".join(node.name for node in self.inventory.nodes)
        return f"cluster={self._config.kind.value} at {self.address} ({names})"

    @property
    def address(self) -> str:
        """host:port of the cluster's head."""
        return str(ray.get_runtime_context().gcs_address)

    @property
    def on_this_machine(self) -> bool:
        """Tell whether all ranks run on the driver's own machine."""
        return self._own is not None

    @property
    def log_folder(self) -> Path | None:
        """Where the ranks' standard error lands; None on a cluster of others."""
        return self._own.log_folder if self._own is not None else None

    def _connect(self, found: Survey) -> None:
        if self._own is None:
            assert self._config.address is not None
            foreign.join(self._config.address)
        elif self._config.kind is ClusterKind.EMULATED:
            shared = _share_of(found, self._config.num_nodes)
            self._own.start_emulated(self._config.num_nodes, slots_of(shared))
        else:
            self._own.start_one(slots_of(found))

    def _take_inventory(self, found: Survey) -> Inventory:
        living = [node for node in ray.nodes() if node["Alive"]]
        if self._own is None:
            surveys = _survey_all(living, timeout_s=self._config.start_timeout_s)
            nodes = [_foreign_node(*pair) for pair in zip(living, surveys, strict=True)]
        else:
            nodes = [_own_node(node, _share_of(found, len(living))) for node in living]
        return Inventory(nodes=sorted_nodes(nodes))

    def _end(self) -> None:
        atexit.unregister(self._end)
        if Session._current is self:
            Session._current = None
        if self._own is not None:
            self._own.stop()
        else:
            ray.shutdown()


def open_session(config: ClusterConfig) -> Session:
    """Connect to the cluster a config names; raise ClusterError where it cannot be reached."""
    current = Session.current()
    if current is not None and current.serves(config):
        return current.hold()
    if current is not None:
        raise ClusterError(
            f"this process already uses another Ray cluster ({current.note}) and Ray allows one at "
            f"a time; close that session before opening cluster={config.kind.value}"
        )
    if ray.is_initialized():
        raise ClusterError(
            "this process has called ray.init() itself; call ray.shutdown() first, and give "
            "rayzero the address of that cluster as cluster=address cluster.address=HOST:PORT"
        )
    if config.kind is ClusterKind.EMULATED and config.device is Device.CUDA:
        raise ClusterError(
            "cluster.device=cuda with cluster=emulated: emulated nodes have no GPUs; "
            "use cluster=local for the GPUs of this machine, or cluster.device=cpu"
        )
    return Session(config)


def _identity(config: ClusterConfig) -> tuple[object, ...]:
    """Name what decides which cluster is started or joined."""
    if config.kind is ClusterKind.ADDRESS:
        return (config.kind, config.address)
    return (config.kind, config.num_nodes)


def _share_of(found: Survey, num_nodes: int) -> Survey:
    """Give one of several nodes on this machine its share of the memory."""
    if num_nodes == 1:
        return found
    memory = found.host_memory_bytes // num_nodes
    return dataclasses.replace(
        found,
        host_memory_bytes=memory,
        num_gpus=0,
        device_name=found.cpu_name,
        device_memory_bytes=None,
    )


def _own_node(node: dict[str, Any], found: Survey) -> Node:
    name = str(node["NodeName"])
    resources = node["Resources"]
    return Node(
        name=name,
        node_id=str(node["NodeID"]),
        address=str(node["NodeManagerAddress"]),
        num_gpus=int(resources.get("GPU", 0)),
        num_slots=int(resources[slot_resource(name)]),
        pin=slot_resource(name),
        pin_share=1.0,
        survey=found,
    )


def _foreign_node(node: dict[str, Any], found: Survey) -> Node:
    address = str(node["NodeManagerAddress"])
    resources = node["Resources"]
    # A node without CPUs is meant to run nothing, as heads of large clusters are.
    seats = slots_of(found) if resources.get("CPU", 0) >= 1 else 0
    return Node(
        name=str(node["NodeName"] or address),
        node_id=str(node["NodeID"]),
        address=address,
        num_gpus=int(resources.get("GPU", 0)),
        num_slots=seats,
        pin=f"node:{address}",
        pin_share=FOREIGN_SHARE,
        survey=found,
    )


def _survey_all(nodes: list[dict[str, Any]], *, timeout_s: float) -> list[Survey]:
    task = ray.remote(survey)
    asked = [
        task.options(
            num_cpus=0, resources={f"node:{node['NodeManagerAddress']}": FOREIGN_SHARE}
        ).remote()
        for node in nodes
    ]
    try:
        return list(ray.get(asked, timeout=timeout_s))
    except ray.exceptions.RayError as error:
        names = ", ".join(str(node["NodeName"]) for node in nodes)
        raise ClusterError(
            f"not every node of the cluster ({names}) ran a first task within "
            f"cluster.start_timeout_s={timeout_s:g}; is rayzero installed on all of them? ({error})"
        ) from error
