"""Random number generators of a rank: kept with a checkpoint, and found again where it is loaded.

At the layout that saved, each rank goes on with its own state. At another one there is no such
state: each data rank then gets a seed of its own, made of the run's seed and the step, and the
ranks of a tp group, which must draw alike, the same.
"""

import random
import zlib
from typing import Any

import numpy as np
import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's, Python's and numpy's generators, as plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": [str(kind), np.asarray(keys).tolist(), position, has_gauss, gauss],
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on where rng_state was taken."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))


def reseed(seed: int, step: int, *, data_rank: int) -> None:
    """Begin streams of a run's seed and step, another one for each data rank."""
    drawn = zlib.crc32(f"{seed}/{step}/{data_rank}".encode())
    torch.manual_seed(drawn)
    random.seed(drawn)
    np.random.seed(drawn)
