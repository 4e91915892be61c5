"""What is not in a peer's nature is refused with the keys to change."""

from typing import Any

import pytest

from rayzero.config.build import build
from rayzero.config.engine import EngineName
from rayzero.config.peers import NATURES
from rayzero.errors import CombinationError

STAGE = {"ddp": 0, "zero_redundancy": 1, "fsdp2": 3, "deepspeed": 3}


def asked(name: str, **groups: Any) -> None:
    engine = {"name": name, **groups.pop("engine", {})}
    build({"engine": engine, "zero": {"stage": STAGE[name]}, **groups})


@pytest.mark.parametrize("engine", STAGE)
def test_each_peer_is_its_own_stages_and_no_other(engine: str) -> None:
    stages = NATURES[EngineName(engine)].stages
    for stage in range(4):
        plain = {"engine": {"name": engine}, "zero": {"stage": stage}}
        if stage in stages:
            build(plain)
        else:
            with pytest.raises(
                CombinationError, match=rf"engine={engine} is .* found stage={stage}"
            ):
                build(plain)


@pytest.mark.parametrize("engine", STAGE)
@pytest.mark.parametrize(
    ("groups", "key"),
    [
        ({"parallel": {"tp": 2}}, "parallel.tp=2"),
        ({"parallel": {"replicate": 2}}, "parallel.replicate=2"),
        ({"offload": {"optimizer": "host"}}, "offload.optimizer=host"),
        ({"engine": {"on_nonfinite": "skip"}}, "engine.on_nonfinite=skip"),
        ({"precision": {"name": "fp16", "params": "fp16", "loss_scale": "8"}}, "precision=fp16"),
        ({"precision": {"keep_fp32": ["*norm*"]}}, "precision.keep_fp32"),
    ],
)
def test_what_no_peer_does_names_the_key_and_the_way_out(
    engine: str, groups: dict[str, Any], key: str
) -> None:
    with pytest.raises(CombinationError, match=rf"{key}.*engine={engine}.*engine=rayzero"):
        asked(engine, **groups)


@pytest.mark.parametrize("engine", STAGE)
def test_bf16_parameters_are_for_every_peer(engine: str) -> None:
    asked(engine, precision={"name": "bf16", "params": "bf16"})


def test_narrow_gradients_are_not_for_fsdp2() -> None:
    paper = {"name": "paper", "params": "bf16", "reduce": "bf16", "accumulate": "bf16"}
    asked("deepspeed", precision=paper)
    with pytest.raises(CombinationError, match=r"precision\.accumulate=bf16 with engine=fsdp2"):
        asked("fsdp2", precision=paper)
