"""From plain values to the frozen config and back: strict, and every message names its key."""

import dataclasses
from typing import Any

import pytest

from rayzero.config.build import Plain, build, build_groups, defaults, to_plain
from rayzero.config.parallel import ParallelConfig, grid_of
from rayzero.config.precision import Dtype
from rayzero.errors import CombinationError, ConfigError


def with_values(**changes: Any) -> Plain:
    """Return the defaults with some keys changed: group__key=value."""
    plain: Any = defaults()
    for path, value in changes.items():
        group, _, key = path.partition("__")
        plain[group][key] = value
    return dict(plain)


def test_plain_values_survive_the_round_trip() -> None:
    assert to_plain(build(defaults())) == defaults()


def test_enums_are_taken_by_their_values() -> None:
    assert build(with_values(precision__params="bf16")).precision.params is Dtype.BF16


def test_a_whole_number_is_a_float_where_one_is_expected() -> None:
    lr = build(with_values(optimizer__lr=1)).optimizer.lr
    assert isinstance(lr, float)
    assert lr == 1.0


def test_the_config_cannot_be_changed() -> None:
    config = build(defaults())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.zero.stage = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero__stge": 1}, ["zero.stge", "did you mean zero.stage?", "bucket_elements"]),
        ({"zero__stage": 7}, ["zero.stage=7", "0, 1, 2, 3"]),
        ({"zero__stage": "two"}, ["zero.stage='two'", "str", "int"]),
        ({"zero__stage": True}, ["zero.stage=True", "bool", "int"]),
        ({"zero__stage": None}, ["zero.stage=None", "expected int"]),
        ({"optimizer__lr": "fast"}, ["optimizer.lr='fast'", "float"]),
        ({"optimizer__lr": float("nan")}, ["optimizer.lr=nan"]),
        ({"optimizer__kind": "lion"}, ["optimizer.kind='lion'", "adamw, adam, sgd"]),
        ({"precision__params": "fp8"}, ["precision.params='fp8'", "fp64, fp32, bf16, fp16"]),
        ({"data__global_batch": 0}, ["data.global_batch=0", "1 or more"]),
        ({"data__held_out": 1.0}, ["data.held_out=1.0", "0 to 1"]),
        ({"run__num_steps": 0}, ["run.num_steps=0", "1 or more"]),
        ({"cluster__kind": "address"}, ["cluster.address=HOST:PORT"]),
        ({"cluster__num_nodes": 2}, ["cluster.num_nodes=2", "cluster=emulated"]),
        ({"cluster__env": [1]}, ["cluster.env", "mapping"]),
        ({"offload__optimizer": "disk"}, ["offload.folder"]),
        ({"model__hidden": 65}, ["model.hidden=65", "model.num_heads=4"]),
        ({"model__num_kv_heads": 3}, ["model.num_kv_heads=3", "1, 2, 4"]),
        ({"model__factory": "module.function"}, ["package.module:function"]),
    ],
)
def test_a_message_names_the_key_the_value_and_what_is_allowed(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(with_values(**changes))
    assert not isinstance(caught.value, CombinationError)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel__tp": 3}, ["parallel.tp=3", "model.num_heads=4", "1, 2, 4"]),
        ({"offload__params": "host"}, ["offload.params=host", "stage=3", "stage=0"]),
        ({"data__seq_len": 2000}, ["data.seq_len=2000", "model.max_seq_len=1024"]),
    ],
)
def test_values_that_do_not_fit_together_are_told_from_bad_ones(
    changes: dict[str, Any], words: list[str]
) -> None:
    plain = with_values(**changes)
    with pytest.raises(CombinationError) as caught:
        build(plain)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert to_plain(build_groups(plain)) == plain


def test_tp_that_does_not_divide_the_ranks_names_its_divisors() -> None:
    with pytest.raises(
        CombinationError, match=r"parallel.tp=4 .* 6 ranks; allowed here: 1, 2, 3, 6"
    ):
        grid_of(ParallelConfig(tp=4), 6)


def test_a_global_batch_that_does_not_divide_names_the_next_that_does() -> None:
    config = build(with_values(data__global_batch=14))
    with pytest.raises(CombinationError, match=r"data.global_batch=14 .* 4 data ranks.* is: 16"):
        config.batching(4)


def test_micro_batch_times_accumulation_times_ranks_is_the_global_batch() -> None:
    config = build(with_values(data__global_batch=24, data__micro_batch=2, parallel__tp=2))
    batching = config.batching(8)
    assert (batching.dp, batching.micro_batch, batching.accumulation) == (4, 2, 3)
    assert batching.dp * batching.micro_batch * batching.accumulation == batching.global_batch
