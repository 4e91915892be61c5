"""Batches as a function of (seed, step, position in the global batch), so that every cut is equal.

However many ranks and micro-batches share a step, the sequence at one position is the same; only
who reads it differs. B sequences, T tokens each.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rayzero.config.data import Batching, DataConfig, DataKind
from rayzero.errors import ConfigError
from rayzero.train.corpus import Bytes, Corpus, load_corpus
from rayzero.train.factory import build_data

Batch = tuple[Tensor, Tensor]
BYTE_VALUES = 256
VALIDATION_STEP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One sequence: what goes in, and what should come out at each of its tokens."""

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[Any]


class Data(Protocol):
    """What the trainer asks of data: ours, or what a user's data.factory returns."""

    @property
    def fingerprint(self) -> str:
        """Say in a few characters what is learnt; ranks that see another one stop the cell."""

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """Return (inputs, targets) of these positions of a step's global batch."""

    def validation(self, positions: Sequence[int]) -> Batch:
        """Return (inputs, targets) that no training step sees; a position is 0 or more."""


class TextData:
    """Windows of bytes at random places of a corpus."""

    def __init__(self, config: DataConfig, corpus: Corpus) -> None:
        self._config = config
        self._corpus = corpus
        self.fingerprint = _fingerprint(config, corpus.train, corpus.held_out)

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """Return (tokens_BT, targets_BT) of these positions of a step's global batch."""
        return _stack([self._draw(step, position) for position in positions])

    def validation(self, positions: Sequence[int]) -> Batch:
        """Return held-out windows; data.validation_sequences positions are spread evenly."""
        num_windows = max(1, self._config.validation_sequences)
        last = len(self._corpus.held_out) - self._config.seq_len - 1
        starts = [last * (position % num_windows) // num_windows for position in positions]
        return _stack([self._window(self._corpus.held_out, start) for start in starts])

    def _draw(self, step: int, position: int) -> Pair:
        text = self._corpus.train
        random = _generator(self._config.seed, step, position)
        pair = self._window(text, int(random.integers(len(text) - self._config.seq_len)))
        if self._config.shuffle_targets:
            places = random.integers(len(text), size=self._config.seq_len)
            return Pair(inputs=pair.inputs, targets=text[places])
        return pair

    def _window(self, text: Bytes, start: int) -> Pair:
        stop = start + self._config.seq_len
        return Pair(inputs=text[start:stop], targets=text[start + 1 : stop + 1])


class SyntheticData:
    """Uniformly random tokens: nothing to learn, nothing to read."""

    def __init__(self, config: DataConfig, *, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self.fingerprint = _fingerprint(config, np.array([vocab_size]))

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """Return (tokens_BT, targets_BT) of these positions of a step's global batch."""
        return _stack([self._draw(step, position) for position in positions])

    def validation(self, positions: Sequence[int]) -> Batch:
        """Return tokens that no training step sees."""
        return self.batch(VALIDATION_STEP, positions)

    def _draw(self, step: int, position: int) -> Pair:
        random = _generator(self._config.seed, step, position)
        tokens = random.integers(self._vocab_size, size=self._config.seq_len + 1)
        return Pair(inputs=tokens[:-1], targets=tokens[1:])


def load_data(config: DataConfig, *, vocab_size: int) -> Data:
    """Load what data.kind names; raise DataError or ConfigError where that cannot be learnt."""
    if config.kind is DataKind.FACTORY:
        return cast(Data, build_data(config))
    if config.kind is DataKind.SYNTHETIC:
        return SyntheticData(config, vocab_size=vocab_size)
    if vocab_size < BYTE_VALUES:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is too small for data.kind=text, which has "
            f"{BYTE_VALUES} byte values; set model.vocab_size={BYTE_VALUES} or more, or "
            "data=synthetic"
        )
    return TextData(config, load_corpus(config))


def positions_of(batching: Batching, data_rank: int, micro_step: int) -> range:
    """Return the places in the global batch of one rank's micro-batch; ranks take runs of it."""
    first = (data_rank * batching.accumulation + micro_step) * batching.micro_batch
    return range(first, first + batching.micro_batch)


def checksum(batch: Batch) -> int:
    """Return 63 bits that tell batches apart: the ranks of one tp group must see the same."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in batch:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little") >> 1


def _stack(pairs: Sequence[Pair]) -> Batch:
    inputs = np.stack([pair.inputs for pair in pairs]).astype(np.int64)
    targets = np.stack([pair.targets for pair in pairs]).astype(np.int64)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def _generator(seed: int, step: int, position: int) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed}/{step}/{position}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


def _fingerprint(config: DataConfig, *contents: npt.NDArray[Any]) -> str:
    """Hash what batches are made of: the content, and the keys that choose from it."""
    keys = (config.kind.value, config.seed, config.seq_len, config.held_out, config.shuffle_targets)
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8)
    for content in contents:
        digest.update(content.data)
    return digest.hexdigest()
