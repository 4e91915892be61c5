"""model=hf: Hugging Face models in a cell with theory beside them, and mistakes in the config."""

from typing import Any

import pytest

from rayzero.config.model import ModelConfig
from rayzero.errors import ConfigError
from rayzero.train.factory import build_model
from tests.ranks import Pools
from tests.train.test_cell import check_theory, config_of, run

pytest.importorskip("transformers")

FACTORY = "rayzero.models.hugging_face:build"
WIDTHS = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2},
    "llama": {**WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 2},
    "bert": {**WIDTHS, "num_attention_heads": 4, "task": "masked"},
    "t5": {"num_layers": 2, "d_model": 16, "d_ff": 24, "num_heads": 2, "task": "seq2seq"},
    "t5 in units": {
        "num_layers": 2,
        "d_model": 256,
        "d_ff": 128,
        "num_heads": 2,
        "d_kv": 8,
        "vocab_size": 260,
        "task": "seq2seq",
    },
    "mixtral": {**WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_cell_trains_a_hugging_face_model_as_theory_says(ranks: Pools, name: str) -> None:
    losses = []
    for stage in range(4):
        config = config_of(
            zero={"stage": stage, "bucket_elements": 5_000},
            model={
                "name": name,
                "config": name.partition(" ")[0],
                "factory": FACTORY,
                "factory_args": {"vocab_size": 256, **MODELS[name]},
            },
            data={"micro_batch": 3},
        )
        reports = [report for report, _ in ranks(2)(run, config)]
        check_theory(reports)
        losses.append([sample.loss for sample in reports[0].steps])
        assert losses[stage] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("config", "args", "words"),
    [
        ("lama", {}, ["model.config='lama'", "llama"]),
        ("llama", {"hiden_size": 8}, ["model.factory_args.hiden_size", "hidden_size"]),
        ("llama", {"task": "chat"}, ["task='chat'", "causal, masked, seq2seq"]),
    ],
)
def test_a_mistake_in_the_config_says_what_is_allowed(
    config: str, args: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(ModelConfig(factory=FACTORY, config=config, factory_args=args))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_config_without_a_factory_is_refused() -> None:
    with pytest.raises(ConfigError, match="set model=hf"):
        ModelConfig(config="llama")
