"""A fresh local MLflow store for each test, copied from one that was set up once."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rayzero.tracking.mlflow_tracker import MlflowTracker
from rayzero.tracking.store import open_store


@pytest.fixture(scope="session")
def prepared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store that holds nothing; its tables take a second to make."""
    folder = tmp_path_factory.mktemp("prepared")
    open_store(None, folder)
    return folder


@pytest.fixture
def output(prepared_store: Path, tmp_path: Path) -> Path:
    """Return an output folder, with a space in its name, whose store is ready."""
    folder = tmp_path / "out put"
    shutil.copytree(prepared_store, folder)
    return folder


@pytest.fixture
def tracker(output: Path) -> Iterator[MlflowTracker]:
    """Return a tracker on that store."""
    with MlflowTracker(open_store(None, output)) as tracker:
        yield tracker


@pytest.fixture
def client(output: Path) -> MlflowClient:
    """Return a client to read back with."""
    return MlflowClient(tracking_uri=f"sqlite:///{output / 'mlflow.db'}")
