"""Cluster group: which machines, what a rank owns, and the figures a planner needs."""

from dataclasses import dataclass, field
from enum import Enum

from rayzero.config.checks import at_least, require


class ClusterKind(Enum):
    """local: our Ray, here. address: a running cluster. emulated: several Ray nodes here.

    profile: figures of machines that are planned for; nothing runs on them.
    """

    LOCAL = "local"
    ADDRESS = "address"
    EMULATED = "emulated"
    PROFILE = "profile"


class Device(Enum):
    """What one rank owns; auto takes GPUs if there are two or more, else CPU slots."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


class Transport(Enum):
    """How CPU ranks send. auto: shared where all ranks can, else pairwise.

    pairwise: each pair exchanges over gloo, on one host and between hosts. shared: ranks of one
    host read each other's memory, several times faster; the same bytes and the same results.
    """

    AUTO = "auto"
    PAIRWISE = "pairwise"
    SHARED = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """Figures of one node, for the planner; null is unknown. GB is 1e9 bytes."""

    device_name: str | None = None
    """The accelerator's name."""
    device_memory_GB: float | None = None
    """Memory of one device."""
    host_memory_GB: float | None = None
    """Memory of one node's host."""
    device_tflops: float | None = None
    """Dense 16-bit peak of one device, 1e12 FLOP/s."""
    device_GBps: float | None = None
    """Bandwidth of a device's memory, 1e9 bytes/s."""
    intra_node_GBps: float | None = None
    """One direction between two devices of a node, 1e9 bytes/s."""
    inter_node_GBps: float | None = None
    """One direction from a node to the network, 1e9 bytes/s, all its links."""
    host_link_GBps: float | None = None
    """One direction between a device and its host, 1e9 bytes/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where the ranks run."""

    name: str = "local"
    """How the profile is called in folders and tables."""
    kind: ClusterKind = ClusterKind.LOCAL
    """local, address, emulated or profile."""
    address: str | None = None
    """host:port of a running Ray cluster's head (kind=address)."""
    device: Device = Device.AUTO
    """auto, cuda or cpu."""
    num_nodes: int = 1
    """Nodes to use."""
    ranks_per_node: int | None = None
    """Ranks on each node; null is every GPU of a node, or 4 CPU ranks in all."""
    threads_per_rank: int = 1
    """CPU threads a rank computes with."""
    transport: Transport = Transport.AUTO
    """auto, pairwise or shared; GPUs use NCCL whatever this says."""
    start_timeout_s: float = 60.0
    """Longest wait for placement, start of the ranks and their process group."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the ranks, such as NCCL_* or GLOO_SOCKET_IFNAME."""
    hardware: HardwareConfig = HardwareConfig()
    """Figures for the planner."""

    def __post_init__(self) -> None:
        at_least("cluster.num_nodes", self.num_nodes, 1)
        at_least("cluster.threads_per_rank", self.threads_per_rank, 1)
        require(
            self.start_timeout_s > 0,
            f"cluster.start_timeout_s={self.start_timeout_s} must be above 0",
        )
        if self.ranks_per_node is not None:
            at_least("cluster.ranks_per_node", self.ranks_per_node, 1)
        require(
            self.kind is not ClusterKind.ADDRESS or self.address is not None,
            "cluster=address needs cluster.address=HOST:PORT of a running Ray cluster",
        )
        require(
            self.kind is not ClusterKind.LOCAL or self.num_nodes == 1,
            f"cluster.num_nodes={self.num_nodes} with cluster=local: this machine is one node; "
            "use cluster=emulated for several Ray nodes here, cluster=address for a real cluster",
        )
