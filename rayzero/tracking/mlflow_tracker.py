"""Write a sweep to MLflow: a parent run and a child per cell, by explicit ids.

[Note: what may fail when]
The store must answer when a sweep starts, or TrackingError ends it before anything has run. After
that a failing write never costs a measurement: it is remembered in `problems`, and the next cell
tries again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from mlflow import MlflowClient

from rayzero.config.run import TrackingConfig
from rayzero.errors import TrackingError
from rayzero.records import CellRecord, Status
from rayzero.tracking.metrics import SETTINGS
from rayzero.tracking.params import flat_params
from rayzero.tracking.provenance import driver_tags, origin_tags
from rayzero.tracking.recovery import recover
from rayzero.tracking.run_writer import write_cell, write_config, write_params, write_tags
from rayzero.tracking.store import STORE_ERRORS, Store, open_store
from rayzero.tracking.tracker import End, NullTracker, Plain, Tracker
from rayzero.tracking.view import save_view, view_path

LOCAL_ADDRESS = "http://127.0.0.1:5000"
UPLOADED = (".csv", ".png", ".html", ".md")


def open_tracker(config: TrackingConfig, output: Path) -> Tracker:
    """Return the tracker that the tracking group asks for; raise TrackingError if it is no use."""
    return MlflowTracker(open_store(config.uri, output)) if config.enabled else NullTracker()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The open parent run."""

    experiment_id: str
    run_id: str


class MlflowTracker:
    """One sweep at a time on its way to an MLflow store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sweep: Sweep | None = None
        self._experiment_id: str | None = None
        self._cells: dict[str, str] = {}
        self._problems: list[str] = []
        self._tags = driver_tags() | origin_tags()

    def open_sweep(
        self, experiment: str, question: str, config: Plain, tags: Mapping[str, str]
    ) -> str:
        """End what a killed driver left running, then start the parent run and save the view."""
        assert self._sweep is None, "close_sweep() the open sweep first"
        try:
            recover(self._store)
            experiment_id = self._store.experiment_id(experiment)
            with self._store.writing() as client:
                save_view(client, experiment_id)
                about = {"kind": "sweep", "mlflow.note.content": question}
                run_id = self._create_run(
                    client, experiment_id, name=experiment, tags={**tags, **about}
                )
                self._sweep = Sweep(experiment_id=experiment_id, run_id=run_id)
                self._write_inputs(client, run_id, config)
        except STORE_ERRORS as error:
            raise TrackingError(
                f"tracking.uri={self._store.uri} cannot be written ({error}); "
                "or run without MLflow: tracking.enabled=false"
            ) from error
        self._experiment_id = experiment_id
        return run_id

    def open_cell(self, name: str, config: Plain) -> str:
        """Start a child run with its config."""
        sweep = self._opened_sweep()
        with self._forgiving(f"start of cell {name}"), self._store.writing() as client:
            tags = {"kind": "cell", "mlflow.parentRunId": sweep.run_id}
            self._cells[name] = self._create_run(client, sweep.experiment_id, name=name, tags=tags)
            self._write_inputs(client, self._cells[name], config)
        return self._cells.get(name, "")

    def close_cell(self, record: CellRecord) -> None:
        """Write metrics, series, tags and files, and end the child run as its status says."""
        name = record.row.cell
        run_id = self._cells.get(name) or self.open_cell(name, record.config)
        if not run_id:
            return
        with self._forgiving(f"results of cell {name}"), self._store.writing() as client:
            row = record.row
            settings = {f"cell.{column}": getattr(row, column) for column in SETTINGS}
            self._write_params(client, run_id, settings)
            write_cell(client, run_id, record)
        with self._forgiving(f"end of cell {name}"), self._store.writing() as client:
            client.set_terminated(run_id, end_of(record).value)
            del self._cells[name]

    def close_sweep(self, end: End, folder: Path) -> None:
        """Upload what the report wrote into `folder`, then end the parent run."""
        run_id = self._opened_sweep().run_id
        files = sorted(p for p in folder.glob("*") if p.suffix in UPLOADED)
        with self._forgiving("files of the sweep"), self._store.writing() as client:
            for path in files:
                client.log_artifact(run_id, str(path))
        self._end(end)

    def view_url(self, address: str | None = None) -> str:
        """Return the link to the saved view; a local store's works while `make ui` runs."""
        if self._experiment_id is None:
            return ""
        is_server = self._store.uri.startswith(("http://", "https://"))
        base = address or (self._store.uri if is_server else LOCAL_ADDRESS)
        return base.rstrip("/") + view_path(self._experiment_id)

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be written, a sentence each, in order, without repetition."""
        return tuple(dict.fromkeys(self._problems))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End open runs: KILLED after Ctrl-C or exit, FAILED after an error."""
        if self._sweep is None:
            return
        if kind is None:
            self._end(End.FINISHED)
        elif issubclass(kind, Exception):
            self._end(End.FAILED)
        else:
            self._end(End.KILLED)

    def _opened_sweep(self) -> Sweep:
        assert self._sweep is not None, "call open_sweep() first"
        return self._sweep

    def _end(self, end: End) -> None:
        """End the parent; a cell still open was cut short, whatever the sweep says."""
        run_id = self._opened_sweep().run_id
        cut_short = End.FAILED if end is End.FAILED else End.KILLED
        with self._forgiving("end of the sweep"), self._store.writing() as client:
            for cell_id in self._cells.values():
                write_tags(client, cell_id, {"status": cut_short.value.lower()})
                client.set_terminated(cell_id, cut_short.value)
            client.set_terminated(run_id, end.value)
        self._cells.clear()
        self._sweep = None

    def _create_run(
        self, client: MlflowClient, experiment_id: str, *, name: str, tags: Mapping[str, str]
    ) -> str:
        run = client.create_run(experiment_id, tags={**self._tags, **tags}, run_name=name)
        return str(run.info.run_id)

    def _write_inputs(self, client: MlflowClient, run_id: str, config: Plain) -> None:
        """Write params and config.json; a failing artifact store does not cost the run."""
        self._write_params(client, run_id, config)
        with self._forgiving("config.json"):
            write_config(client, run_id, config)

    def _write_params(self, client: MlflowClient, run_id: str, params: Plain) -> None:
        refused = write_params(client, run_id, flat_params(params))
        if refused:
            self._problems.append(f"MLflow refused the parameters {', '.join(refused)}")

    @contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        try:
            yield
        except (*STORE_ERRORS, TrackingError) as error:
            self._problems.append(f"MLflow: {what} could not be written: {error}")


def end_of(record: CellRecord) -> End:
    """Say how a cell's run ended: 'impossible' is an answer, not a failure."""
    known = (Status.OK.value, Status.IMPOSSIBLE.value)
    return End.FINISHED if record.row.status in known else End.FAILED
