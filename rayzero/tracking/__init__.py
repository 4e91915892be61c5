"""MLflow, written by the driver alone: sweeps, cells, a saved comparison view, the local UI."""

import os

# MLflow reads this once, when it is imported; a user's own choice stays.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
