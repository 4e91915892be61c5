"""Batches depend on seed, step and position alone; held-out bytes stay held out."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rayzero.config.data import DataConfig, DataKind, batching_of
from rayzero.errors import ConfigError, DataError
from rayzero.train.corpus import load_corpus
from rayzero.train.data import Data, checksum, load_data, positions_of

TEXT = DataConfig(seq_len=32, global_batch=12)
SYNTHETIC = replace(TEXT, kind=DataKind.SYNTHETIC)
BOTH = pytest.mark.parametrize("config", [TEXT, SYNTHETIC], ids=["text", "synthetic"])


def load(config: DataConfig, vocab_size: int = 256) -> Data:
    """Load the data of a byte model."""
    return load_data(config, vocab_size=vocab_size)


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    """Return a folder of two files of text whose every line is unlike the others."""
    (tmp_path / "part").mkdir()
    lines = [f"line {i} of this text, {i * i} is its square\n" for i in range(4000)]
    (tmp_path / "a.txt").write_text("".join(lines[:2500]))
    (tmp_path / "part" / "b.txt").write_text("".join(lines[2500:]))
    return tmp_path


@BOTH
def test_every_cut_of_the_global_batch_sees_the_same_sequences(config: DataConfig) -> None:
    data = load(config)
    whole, _ = data.batch(5, range(12))
    for dp, micro in ((1, 12), (2, 3), (3, 4), (4, 1), (12, 1)):
        batching = batching_of(replace(config, micro_batch=micro), dp)
        pieces = [
            data.batch(5, positions_of(batching, rank, index))[0]
            for rank in range(dp)
            for index in range(batching.accumulation)
        ]
        assert torch.equal(torch.cat(pieces), whole)


@BOTH
def test_steps_seeds_and_positions_have_other_sequences(config: DataConfig) -> None:
    data = load(config)
    batches = [data.batch(0, range(8)), data.batch(1, range(8)), data.batch(0, range(8, 16))]
    batches.append(load(replace(config, seed=1)).batch(0, range(8)))
    rows = [tuple(row.tolist()) for inputs, _ in batches for row in inputs]
    assert len(set(rows)) == len(rows)


@BOTH
def test_targets_are_the_next_tokens(config: DataConfig) -> None:
    inputs, targets = load(config).batch(0, range(4))
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_default_text_is_python_source_of_some_ten_megabytes() -> None:
    corpus = load_corpus(TEXT)
    assert len(corpus.train) + len(corpus.held_out) > 5_000_000
    assert b"def __init__(self" in corpus.train.tobytes()
    share = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert share == pytest.approx(0.05, abs=0.005)


def test_no_byte_is_both_held_out_and_trained_on(prose: Path) -> None:
    corpus = load_corpus(replace(TEXT, path=str(prose)))
    text = b"".join(f.read_bytes() for f in (prose / "a.txt", prose / "part" / "b.txt"))
    assert len(corpus.train) + len(corpus.held_out) == len(text)
    trained = set(corpus.train.tobytes().splitlines()[1:-1])
    held_out = corpus.held_out.tobytes().splitlines()[1:-1]
    assert held_out
    # A line at a seam of blocks is cut in two; no whole one is in both.
    assert len(trained & set(held_out)) == 0
    joined = Counter(corpus.train.tobytes()) + Counter(corpus.held_out.tobytes())
    assert joined == Counter(text)


def test_validation_reads_held_out_bytes_alone(prose: Path) -> None:
    config = replace(TEXT, path=str(prose))
    held_out = load_corpus(config).held_out.tobytes()
    inputs, targets = load(config).validation(range(config.validation_sequences))
    for window, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert bytes([*window, target[-1]]) in held_out
    assert len({tuple(w) for w in inputs.tolist()}) == config.validation_sequences


def test_a_glob_names_files(prose: Path) -> None:
    folder = load_corpus(replace(TEXT, path=str(prose)))
    every = load_corpus(replace(TEXT, path=f"{prose}/**/*.txt"))
    one = load_corpus(replace(TEXT, path=f"{prose}/part/*"))
    assert np.array_equal(every.train, folder.train)
    assert len(one.train) < len(every.train)


@pytest.mark.parametrize("kind", ["missing", "empty", "short"])
def test_text_that_cannot_be_learnt_is_refused_by_its_key(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind != "missing":
        path.mkdir()
    if kind == "short":
        (path / "a.txt").write_text("too short")
    with pytest.raises(DataError, match=r"data\.path=") as caught:
        load(replace(TEXT, path=str(path)))
    assert str(path) in str(caught.value)
    assert "data.seq_len + 1 = 33" in str(caught.value)


def test_the_shortest_text_that_is_accepted_gives_batches(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 70)
    data = load(replace(TEXT, path=str(tmp_path)))
    assert data.batch(0, range(3))[0].shape == (3, 32)
    assert data.validation(range(3))[0].shape == (3, 32)


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size=100"):
        load(TEXT, vocab_size=100)


def test_synthetic_tokens_use_the_whole_vocabulary() -> None:
    inputs, _ = load(SYNTHETIC, vocab_size=1000).batch(0, range(200))
    assert 0 <= inputs.min() < 5
    assert 995 <= inputs.max() < 1000


def test_shuffled_targets_have_the_texts_letters_but_nothing_to_do_with_the_inputs() -> None:
    plain, shuffled = load(TEXT), load(replace(TEXT, shuffle_targets=True))
    (inputs, targets), (same, control) = plain.batch(0, range(400)), shuffled.batch(0, range(400))
    assert torch.equal(inputs, same)
    assert (targets == control).double().mean() < 0.15
    space = ord(" ")
    share = (targets == space).double().mean().item()
    assert (control == space).double().mean().item() == pytest.approx(share, abs=0.03)
    after_d = control[inputs == ord("d")]
    assert (after_d == ord("e")).double().mean() < 0.1  # "de" of "def" and others: far more in text
    assert torch.equal(shuffled.validation([0])[1], plain.validation([0])[1])


def test_the_fingerprint_tells_other_content_and_other_keys(prose: Path) -> None:
    config = replace(TEXT, path=str(prose))
    first = load(config).fingerprint
    assert load(config).fingerprint == first
    others = [
        load(replace(config, seq_len=16)).fingerprint,
        load(replace(config, seed=1)).fingerprint,
        load(replace(config, shuffle_targets=True)).fingerprint,
        load(SYNTHETIC).fingerprint,
        load(SYNTHETIC, vocab_size=512).fingerprint,
    ]
    (prose / "a.txt").write_text((prose / "a.txt").read_text().replace("line 7 ", "line 8 "))
    others.append(load(config).fingerprint)
    assert len({first, *others}) == 7


def test_the_checksum_tells_batches_apart() -> None:
    data = load(TEXT)
    inputs, targets = data.batch(0, range(4))
    changed = targets.clone()
    changed[3, 31] += 1
    sums = {
        checksum((inputs, targets)),
        checksum((targets, inputs)),
        checksum((inputs, changed)),
        checksum(data.batch(0, range(4, 8))),
    }
    assert len(sums) == 4
    assert checksum(data.batch(0, range(4))) == checksum((inputs, targets))
    assert all(0 <= value < 2**63 for value in sums)
