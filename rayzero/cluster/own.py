"""Start Ray nodes of our own on this machine and end every process of theirs.

[Note: alone on this machine]
Ray keeps the address of the last cluster in its temporary folder and joins it when asked without an
address, so a cluster in the common folder could be joined by strangers, and be joined by us after
a killed run. Ours lives in a new folder of its own. It listens on the loopback interface only: Ray
does that by itself on macOS and Windows, and here through the same switch.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants
from ray.cluster_utils import Cluster

PREFIX = "rz-"
OBJECT_STORE_BYTES = 100 << 20
LONGEST_FOLDER = 16
"""Ray's socket paths start with the temporary folder and must stay below 107 characters."""
GRACE_S = 8.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",
}
"""Ray's niceness of 15 would leave ranks a thirtieth of a core that any other program wants too."""
FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""A lost node is noticed in a second; by Ray's defaults it takes thirteen."""


class OwnCluster:
    """Ray nodes of ours on this machine, named node0, node1, ..."""

    def __init__(self) -> None:
        common = tempfile.gettempdir()
        place = common if len(common) <= LONGEST_FOLDER else "/tmp"
        remove_stale(Path(place))
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
        self._nodes: Cluster | None = None

    def start_one(self, num_slots: int) -> None:
        """Start one node and connect to it; Ray finds the GPUs."""
        with _alone(self._folder):
            ray.init(
                address="local",
                num_cpus=1,
                resources=_slots("node0", num_slots),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_name="node0",
            )

    def start_emulated(self, num_nodes: int, num_slots: int) -> None:
        """Start several nodes without GPUs and connect to the first."""
        (self._folder / "ray").mkdir()
        with _alone(self._folder):
            self._nodes = Cluster()
            for index in range(num_nodes):
                self._add_node(index, num_slots)
            ray.init(address=self._nodes.address, log_to_driver=False, logging_level=logging.ERROR)

    def stop(self) -> None:
        """End all processes, those that Ray forgets too, and remove the folder."""
        processes = self._processes()
        ray.shutdown()
        if self._nodes is not None:
            self._nodes.shutdown()
            self._nodes = None
        _, left = psutil.wait_procs(processes, timeout=GRACE_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=GRACE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def log_folder(self) -> Path:
        """Where Ray writes the output of its workers."""
        return self._folder / "ray" / "session_latest" / "logs"

    def _add_node(self, index: int, num_slots: int) -> None:
        assert self._nodes is not None
        name = f"node{index}"
        head = {"include_dashboard": False, "_system_config": FAST_HEALTH_CHECKS}
        self._nodes.add_node(
            num_cpus=1,
            object_store_memory=OBJECT_STORE_BYTES,
            node_name=name,
            resources=_slots(name, num_slots),
            **(head if index == 0 else {}),
        )

    def _processes(self) -> list[psutil.Process]:
        """Find children of this process that work in our folder, and all that they started."""
        found: list[psutil.Process] = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(str(self._folder) in word for word in child.cmdline()):
                    found += [child, *child.children(recursive=True)]
        return found


def remove_stale(place: Path) -> None:
    """Remove folders of drivers that were killed; Ray's processes of such end within a minute."""
    for folder in place.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def slot_resource(node_name: str) -> str:
    """Name the resource that counts the slots of a node of ours."""
    return f"rayzero_rank_{node_name}"


def _slots(node_name: str, num_slots: int) -> dict[str, float]:
    return {slot_resource(node_name): float(num_slots)}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Start Ray in this folder and on loopback only. See [Note: alone on this machine]."""
    values = {**ENVIRONMENT, "RAY_TMPDIR": str(folder)}
    before = {name: os.environ.get(name) for name in values}
    reachable = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(values)
    # Ray reads its own switch once, when it is imported.
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = reachable
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
