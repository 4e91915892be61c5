"""What a cluster offers: its nodes with their devices and memory, and how many ranks each can seat.

[Note: seats for CPU ranks]
A CPU rank is a slot, not a core: four ranks run on two cores, only slower. Ray counts slots by a
custom resource of the node (`rayzero_rank_node0`), one slot for each GiB of its memory, since
memory is what a rank cannot share. On a cluster that others started there is no such resource;
there a rank takes a thousandth of the resource `node:ADDRESS` that Ray gives every node. Either way
the resource belongs to one node only, so asking for it also says which node: that is its `pin`.
"""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 1 << 30
MIN_SLOTS = 4
FOREIGN_SHARE = 0.001
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a machine is made of."""

    host_memory_bytes: int
    num_cores: int
    cpu_name: str
    num_gpus: int
    device_name: str
    """The accelerator's name, or the CPU's where there is none."""
    device_memory_bytes: int | None
    """Memory of one accelerator; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One Ray node."""

    name: str
    """Stable from run to run: the name Ray was given for it, else its address."""
    node_id: str
    """Ray's own id, random in every run."""
    address: str
    num_gpus: int
    num_slots: int
    """CPU ranks it can seat. See [Note: seats for CPU ranks]."""
    pin: str
    """The Ray resource that only this node has."""
    pin_share: float
    """How much of it one rank takes."""
    survey: Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All living nodes, sorted by name."""

    nodes: tuple[Node, ...]

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(node.num_gpus for node in self.nodes)

    def hardware(self) -> tuple[str, ...]:
        """Describe each node without names or ids: equal where measurements may be compared."""
        return tuple(sorted(_hardware_of(node) for node in self.nodes))


def survey() -> Survey:
    """Look at the machine this process runs on; needs neither Ray nor torch."""
    gpus = _nvidia_smi()
    cpu_name = _cpu_name()
    return Survey(
        host_memory_bytes=_host_memory_bytes(),
        num_cores=psutil.cpu_count() or 1,
        cpu_name=cpu_name,
        num_gpus=len(gpus),
        device_name=gpus[0][0] if gpus else cpu_name,
        device_memory_bytes=gpus[0][1] if gpus else None,
    )


def slots_of(found: Survey) -> int:
    """Return how many ranks a node of ours seats. See [Note: seats for CPU ranks]."""
    return max(MIN_SLOTS, found.num_gpus, found.host_memory_bytes // GIB)


def by_name(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts node2 before node10 and 10.0.0.9 before 10.0.0.10."""
    return tuple(
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.findall(r"\d+|\D+", name)
    )


def sorted_nodes(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Sort by (name, address), never by Ray's random id: ranks are the same in every run."""
    return tuple(sorted(nodes, key=lambda node: (by_name(node.name), by_name(node.address))))


def _hardware_of(node: Node) -> str:
    found = node.survey
    device = f"{node.num_gpus} x {found.device_name}" if node.num_gpus else "no GPU"
    memory = round(found.host_memory_bytes / GIB)
    return f"{device}; {found.num_cores} cores {found.cpu_name}; {memory} GiB"


def _host_memory_bytes() -> int:
    limits = [psutil.virtual_memory().total]
    for path in map(Path, _CGROUP_LIMITS):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return "CPU"


def _nvidia_smi() -> list[tuple[str, int]]:
    """Return (name, memory in bytes) of each GPU; empty where there is no working driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = subprocess.run(
        [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    rows = [line.rsplit(",", 1) for line in asked.stdout.splitlines() if "," in line]
    return [(name.strip(), int(mib) << 20) for name, mib in rows if mib.strip().isdigit()]
