"""The only door to safetensors, opened when an export is read or written.

So the engine trains, saves and loads on a machine that has torch alone.
"""

from pathlib import Path
from typing import Any

import torch

from rayzero.errors import CheckpointError, DamagedCheckpointError


def open_safetensors(path: Path) -> Any:
    """Open a file for reading parts of it."""
    found = _safetensors()
    try:
        return found.safe_open(path, framework="pt")
    except found.SafetensorError as error:
        raise DamagedCheckpointError(f"{path} is no whole safetensors file ({error})") from error


def load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a whole file."""
    with open_safetensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def save_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file; raise OSError where it cannot be written."""
    found = _safetensors()
    try:
        found.torch.save_file(tensors, path, metadata={"format": "pt"})
    except found.SafetensorError as error:
        raise OSError(str(error)) from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError(
            "exports are safetensors files, and the package safetensors is not installed: "
            "`pip install safetensors`, or use engine.save and engine.load"
        ) from error
    return safetensors
