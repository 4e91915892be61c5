"""The MLflow store: find it, prove that it answers, and let one process write at a time.

[Note: the local store]
OUTPUT/mlflow.db (sqlite) holds runs, OUTPUT/mlartifacts their files, both by absolute path. MLflow
builds the tables on first use and two processes that do so at once break each other, so opening
and writing happen under a file lock. MLflow keeps absolute artifact paths in the tables; when the
folder has moved they are rewritten on the next opening.
"""

import contextlib
import logging
import socket
import sqlite3
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock
from mlflow import MlflowClient, environment_variables
from mlflow.exceptions import MlflowException

from rayzero.errors import TrackingError

PROBE_S = 3.0
LOCK_S = 60.0
REQUEST_S = 5
WITHOUT = "or run without MLflow: tracking.enabled=false"
STORE_ERRORS = (MlflowException, OSError)
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """An opened store. artifacts: root folder of a local store, None where a server decides."""

    uri: str
    client: MlflowClient
    artifacts: Path | None
    lock: FileLock | None

    @contextlib.contextmanager
    def writing(self) -> Iterator[MlflowClient]:
        """Yield the client: alone at a local store, with bounded requests at a server."""
        probe(self.uri)
        with self.lock or contextlib.nullcontext(), bounded_requests(num_retries=1):
            yield self.client

    def experiment_id(self, name: str) -> str:
        """Find the experiment, or create it with absolute artifact paths."""
        with self.writing() as client:
            found = client.get_experiment_by_name(name)
            if found is None:
                return self._create_experiment(client, name)
            if found.lifecycle_stage != "active":
                client.restore_experiment(found.experiment_id)
            return str(found.experiment_id)

    def _create_experiment(self, client: MlflowClient, name: str) -> str:
        location = (self.artifacts / _folder_name(name)).as_uri() if self.artifacts else None
        try:
            return str(client.create_experiment(name, location))
        except MlflowException:
            # On a server another client may have been quicker.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)


def open_store(uri: str | None, output: Path) -> Store:
    """Open the store of tracking.uri, the local one under `output` if it is None.

    Raise TrackingError within seconds if it cannot be reached or written. Nothing of MLflow's own
    environment (MLFLOW_TRACKING_URI, MLFLOW_RUN_ID, ...) is asked.
    """
    quieten()
    local = local_database(uri, output)
    if local is None:
        assert uri is not None
        return _opened(uri, artifacts=None, lock=None)
    artifacts = local.parent / "mlartifacts"
    lock = FileLock(local.with_name(local.name + ".lock"), timeout=LOCK_S)
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        with lock:
            if uri is None:
                relocate(local, artifacts)
            return _opened(f"sqlite:///{local}", artifacts=artifacts, lock=lock)
    except (OSError, sqlite3.Error) as error:
        raise TrackingError(
            f"the MLflow store {local} cannot be written ({error}); "
            f"choose another folder with run.output=FOLDER, {WITHOUT}"
        ) from error


def local_database(uri: str | None, output: Path) -> Path | None:
    """Return the absolute path of a sqlite store, None for a server; refuse other local stores."""
    if uri is None:
        return output.resolve() / "mlflow.db"
    if uri.startswith("sqlite:///"):
        return Path(uri.removeprefix("sqlite:///")).resolve()
    if uri != "databricks" and urlsplit(uri).scheme in ("", "file", "sqlite"):
        raise TrackingError(
            f"tracking.uri={uri} is not a store MLflow still writes; allowed: "
            "sqlite:////ABSOLUTE/FILE.db, http(s)://HOST:PORT of a server, a database URI, "
            f"or null for sqlite in run.output; {WITHOUT}"
        )
    return None


def probe(uri: str) -> None:
    """Raise TrackingError unless the server's port accepts a connection; local stores pass."""
    parts = urlsplit(uri)
    try:
        port = parts.port or _PORTS.get(parts.scheme.partition("+")[0])
        if parts.hostname is not None and port is not None:
            socket.create_connection((parts.hostname, port), timeout=PROBE_S).close()
    except (OSError, ValueError) as error:
        raise TrackingError(_unreachable(uri, error)) from error


@contextlib.contextmanager
def bounded_requests(num_retries: int) -> Iterator[None]:
    """Bound MLflow's HTTP requests inside the block, and let it print no links.

    Its own limits wait for minutes. MLflow reads its variables at each request; they are put back,
    so no child inherits them.
    """
    limits = {
        environment_variables.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT: True,
        environment_variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES: num_retries,
        environment_variables.MLFLOW_HTTP_REQUEST_TIMEOUT: REQUEST_S,
    }
    before = {variable: variable.get_raw() for variable in limits}
    for variable, value in limits.items():
        variable.set(value)
    try:
        yield
    finally:
        for variable, raw in before.items():
            if raw is None:
                variable.unset()
            else:
                variable.set(raw)


def relocate(database: Path, artifacts: Path) -> None:
    """Point a moved store's artifact paths at where its folder is now."""
    if not database.exists():
        return
    root = artifacts.as_uri()
    with contextlib.closing(sqlite3.connect(database, timeout=LOCK_S)) as connection:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        if not {"experiments", "runs"} <= tables:
            return
        places = connection.execute("SELECT artifact_location FROM experiments").fetchall()
        old_roots = {
            place[: place.rindex("/mlartifacts/") + len("/mlartifacts")]
            for (place,) in places
            if place and "/mlartifacts/" in place
        } - {root}
        for old in old_roots:
            for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} LIKE ?",
                    (root, len(old) + 1, f"{old}/%"),
                )
        connection.commit()


def quieten() -> None:
    """Keep MLflow's notes and tracebacks off the terminal; what fails is raised as well."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _opened(uri: str, *, artifacts: Path | None, lock: FileLock | None) -> Store:
    probe(uri)
    try:
        with bounded_requests(num_retries=0), warnings.catch_warnings():
            # MLflow's models use what its SQLAlchemy has deprecated; nobody here can mend it.
            warnings.simplefilter("ignore", DeprecationWarning)
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_experiments(max_results=1)
    except (*STORE_ERRORS, ImportError) as error:  # ImportError: a database without its driver
        raise TrackingError(_unreachable(uri, error)) from error
    return Store(uri=uri, client=client, artifacts=artifacts, lock=lock)


def _unreachable(uri: str, error: BaseException) -> str:
    reason = textwrap.shorten(str(error), 300) or type(error).__name__
    return (
        f"tracking.uri={_without_password(uri)} does not answer ({reason}); "
        f"start the server, correct tracking.uri (null is sqlite in run.output), {WITHOUT}"
    )


def _without_password(uri: str) -> str:
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    return parts._replace(netloc=f"{parts.username}:***@{parts.netloc.rpartition('@')[2]}").geturl()


def _folder_name(experiment: str) -> str:
    kept = "".join(c if c.isalnum() or c in "-_." else "_" for c in experiment)
    return kept.strip(".") or "experiment"
