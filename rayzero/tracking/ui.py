"""Serve the local store's MLflow UI on this machine: `python -m rayzero.tracking.ui OUTPUT`."""

import argparse
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlflow import environment_variables

from rayzero.errors import TrackingError
from rayzero.tracking.store import open_store
from rayzero.tracking.view import has_view, view_path

START_S = 60.0
STOP_S = 10.0
PORTS_TRIED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running MLflow server and the saved views of its experiments, by experiment name."""

    process: "subprocess.Popen[bytes]"
    address: str
    views: dict[str, str]


def serve(output: Path, host: str = "127.0.0.1", port: int = 5000) -> None:
    """Serve until Ctrl-C; print the address and a link to each experiment's saved view."""
    with served(output, host=host, port=port) as server:
        print(f"MLflow UI: {server.address}  (Ctrl-C ends it)", flush=True)
        for name, url in server.views.items():
            print(f"  {name}: {url}", flush=True)
        try:
            server.process.wait()
        except KeyboardInterrupt:
            print("MLflow UI ended", flush=True)


@contextmanager
def served(output: Path, *, host: str, port: int) -> Iterator[Server]:
    """Run the server inside the block, on the first free port from `port` on."""
    database = output.resolve() / "mlflow.db"
    if not database.exists():
        raise TrackingError(
            f"there is no MLflow store {database}; run a sweep first, "
            "or name the folder of your results: run.output=FOLDER"
        )
    store = open_store(None, output)
    experiments = [e for e in store.client.search_experiments() if has_view(e)]
    address = f"http://{host}:{_free_port(host, port)}"
    log = database.with_name("mlflow_server.log")
    process = _start(store.uri, database.with_name("mlartifacts"), address, log)
    try:
        _wait_until_it_answers(process, address, log)
        views = {e.name: address + view_path(e.experiment_id) for e in experiments}
        yield Server(process=process, address=address, views=views)
    finally:
        _stop(process)


def _start(uri: str, artifacts: Path, address: str, log: Path) -> "subprocess.Popen[bytes]":
    # Its background jobs serve nothing here and would outlive it.
    environment_variables.MLFLOW_SERVER_ENABLE_JOB_EXECUTION.set(False)
    host, _, port = address.removeprefix("http://").rpartition(":")
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
    command += ["--backend-store-uri", uri, "--default-artifact-root", artifacts.as_uri()]
    command += ["--host", host, "--port", port]
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TrackingError(f"mlflow server did not start at {address}; its log is {log}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port(host: str, first: int) -> int:
    for port in range(first, first + PORTS_TRIED):
        with closing(socket.socket()) as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind((host, port))
            except OSError:
                continue
            return port
    raise TrackingError(
        f"ports {first} to {first + PORTS_TRIED - 1} of {host} are all taken; "
        "name another first port: --port NUMBER"
    )


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m rayzero.tracking.ui", description=__doc__)
    parser.add_argument("output", type=Path, help="folder of the results (run.output)")
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on")
    parser.add_argument("--port", type=int, default=5000, help="first port to try")
    arguments = parser.parse_args()
    # SIGTERM ends by an exception, so that the server is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        serve(arguments.output, host=arguments.host, port=arguments.port)
    except TrackingError as error:
        sys.exit(f"rayzero: {error}")


if __name__ == "__main__":
    main()
