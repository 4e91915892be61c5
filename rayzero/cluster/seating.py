"""How many ranks a config asks for, and on which devices of which nodes they sit."""

from dataclasses import dataclass

from rayzero.cluster.inventory import Inventory, Node
from rayzero.config.cluster import ClusterConfig, Device
from rayzero.errors import ClusterError

DEFAULT_CPU_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """The same number of ranks on each node."""

    device: Device
    """CUDA or CPU."""
    nodes: tuple[Node, ...]
    ranks_per_node: int
    note: str
    """What was chosen and why, in a sentence."""

    @property
    def world(self) -> int:
        """All ranks."""
        return len(self.nodes) * self.ranks_per_node

    def keeps_inside(self, tp: int) -> bool:
        """Tell whether groups of tp neighbouring ranks never cross a node's border."""
        return self.ranks_per_node % tp == 0


def seat(config: ClusterConfig, inventory: Inventory) -> Seating:
    """Choose device and nodes; raise ClusterError with asked and available if they are too few."""
    device = _device_of(config, inventory)
    ranks = config.ranks_per_node or _default_ranks(config, device, inventory)
    fitting = [node for node in inventory.nodes if _capacity(node, device) >= ranks]
    if len(fitting) < config.num_nodes:
        raise ClusterError(_too_few(config, device, ranks, inventory))
    return Seating(
        device=device,
        nodes=tuple(fitting[: config.num_nodes]),
        ranks_per_node=ranks,
        note=_note(config, device, ranks, inventory),
    )


def _device_of(config: ClusterConfig, inventory: Inventory) -> Device:
    if config.device is not Device.AUTO:
        return config.device
    return Device.CUDA if inventory.num_gpus >= 2 else Device.CPU


def _default_ranks(config: ClusterConfig, device: Device, inventory: Inventory) -> int:
    if device is Device.CPU:
        return max(1, DEFAULT_CPU_RANKS // config.num_nodes)
    gpus = sorted((node.num_gpus for node in inventory.nodes), reverse=True)
    return max(1, gpus[min(config.num_nodes, len(gpus)) - 1])


def _capacity(node: Node, device: Device) -> int:
    return node.num_gpus if device is Device.CUDA else node.num_slots


def _too_few(config: ClusterConfig, device: Device, ranks: int, inventory: Inventory) -> str:
    what = "GPUs" if device is Device.CUDA else "CPU ranks"
    offers = [(node.name, _capacity(node, device)) for node in inventory.nodes]
    available = ", ".join(f"{name} has {number}" for name, number in offers)
    message = (
        f"asked for {config.num_nodes * ranks} {what} (cluster.num_nodes={config.num_nodes} x "
        f"cluster.ranks_per_node={ranks}), available {sum(n for _, n in offers)} ({available})"
    )
    if device is Device.CUDA:
        return f"{message}; lower cluster.ranks_per_node, or set cluster.device=cpu"
    return f"{message}; a node seats one CPU rank per GiB of memory: lower cluster.ranks_per_node"


def _note(config: ClusterConfig, device: Device, ranks: int, inventory: Inventory) -> str:
    what = "GPU" if device is Device.CUDA else "CPU"
    where = "1 node" if config.num_nodes == 1 else f"{config.num_nodes} nodes"
    chosen = f"{config.num_nodes * ranks} {what} ranks, {ranks} on each of {where}"
    if config.device is not Device.AUTO:
        return chosen
    return (
        f"{chosen} (cluster.device=auto takes GPUs where there are two or more; "
        f"found {inventory.num_gpus})"
    )
