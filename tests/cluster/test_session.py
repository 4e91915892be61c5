"""Which cluster a session joins or starts, and what it leaves behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rayzero.cluster.gang import open_gang
from rayzero.cluster.own import PREFIX, remove_stale
from rayzero.cluster.session import open_session
from rayzero.config.cell import CellConfig
from rayzero.config.cluster import ClusterConfig, ClusterKind, Device
from rayzero.errors import ClusterError
from tests.cluster import tasks
from tests.cluster.conftest import DEAD_ADDRESS, emulated_cell, local_cell

pytestmark = pytest.mark.timeout(120)

DRIVER = """
from rayzero.cluster.gang import open_gang
from rayzero.cluster.session import open_session
from tests.cluster import tasks
from tests.cluster.conftest import local_cell
cell = local_cell(1)
with open_session(cell.cluster) as session, open_gang(session, cell) as gang:
    print("ready", flush=True)
    gang.run(tasks.sleep_on, 0, timeout_s=100, join=False)
"""


def joining(address: str) -> ClusterConfig:
    return ClusterConfig(kind=ClusterKind.ADDRESS, address=address, device=Device.CPU)


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """Answer connections with a few bytes, as something that is not Ray."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(answer)
                    connection.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_dead_address_is_an_error_in_seconds() -> None:
    start = time.monotonic()
    with pytest.raises(ClusterError, match=r"cluster\.address=127\.0\.0\.1:1"):
        open_session(joining(DEAD_ADDRESS))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_an_address_that_is_not_ray_is_an_error_in_seconds(answer: bytes) -> None:
    start = time.monotonic()
    with (
        listening(answer) as address,
        pytest.raises(ClusterError, match=r"cluster\.address=.*not a Ray head node"),
    ):
        open_session(joining(address))
    assert time.monotonic() - start < 8


@pytest.mark.parametrize("address", ["nowhere", "ray://10.0.0.1:10001", "host:port"])
def test_a_malformed_address_says_how_it_should_look(address: str) -> None:
    with pytest.raises(ClusterError, match="HOST:PORT"):
        open_session(joining(address))


def test_emulated_nodes_have_no_gpus() -> None:
    config = ClusterConfig(kind=ClusterKind.EMULATED, num_nodes=2, device=Device.CUDA)
    with pytest.raises(ClusterError, match=r"cluster\.device=cuda"):
        open_session(config)


def test_folders_of_killed_drivers_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    stale, ours = tmp_path / f"{PREFIX}{dead.pid}-x", tmp_path / f"{PREFIX}{os.getpid()}-x"
    other = tmp_path / "another"
    for folder in (stale, ours, other):
        folder.mkdir()
    remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([ours, other])


@pytest.mark.slow
def test_a_second_session_is_the_first_or_an_error_and_all_stay_on_loopback() -> None:
    others = set(psutil.Process().children(recursive=True))
    with open_session(local_cell().cluster) as first:
        with open_session(local_cell(2).cluster) as second:
            assert second is first
        assert first.is_open
        with pytest.raises(ClusterError, match="one at a time"):
            open_session(emulated_cell(2).cluster)
        addresses = {
            connection.laddr.ip
            for process in {psutil.Process(), *psutil.Process().children(recursive=True)} - others
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert addresses
        assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        ours = set(psutil.Process().children(recursive=True)) - others
    assert not first.is_open
    assert [process for process in ours if process.is_running()] == []


@pytest.mark.slow
def test_an_interrupt_ends_everything() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as driver:
        assert driver.stdout is not None
        assert any("ready" in line for line in driver.stdout)
        ours = psutil.Process(driver.pid).children(recursive=True)
        time.sleep(0.5)
        os.killpg(driver.pid, signal.SIGINT)
        output, _ = driver.communicate(timeout=90)
    assert "KeyboardInterrupt" in output
    assert driver.returncode != 0
    assert ours
    assert [process for process in ours if process.is_running()] == []


@contextlib.contextmanager
def running_cluster() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a Ray cluster as an administrator would; its sockets need a short path."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    options = ["--num-cpus=1", "--object-store-memory=104857600", "--include-dashboard=false"]
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        place = [f"--port={port}", f"--temp-dir={folder}", "--disable-usage-stats"]
        with (Path(folder) / "log").open("w") as log:
            head = subprocess.Popen([*command, *options, *place], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while "Ray runtime started" not in (text := (Path(folder) / "log").read_text()):
                assert head.poll() is None, text
                assert time.monotonic() < deadline, text
                time.sleep(0.2)
            yield f"127.0.0.1:{port}", head
        finally:
            head.terminate()
            head.wait(timeout=30)


@pytest.mark.slow
def test_a_running_cluster_is_joined_and_left_running() -> None:
    with running_cluster() as (address, head):
        config = joining(address)
        cell = CellConfig(cluster=config)
        with open_session(config) as session, open_gang(session, cell) as gang:
            assert gang.run(tasks.add_up, 0.0, timeout_s=30)[3] == (3, 4, 6.0)
            ranks = [psutil.Process(found.pid) for found in gang.whereabouts]
        assert psutil.wait_procs(ranks, timeout=10)[1] == []
        assert head.poll() is None
        with open_session(config) as again:
            assert again.inventory == session.inventory
