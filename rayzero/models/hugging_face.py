"""Hugging Face architectures, unmodified, built from a config alone: the factory of model=hf.

The only file that imports transformers (extra `hf`). B batch, T tokens, V vocabulary.
"""

import difflib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
)

from rayzero.errors import ConfigError
from rayzero.models.loss import CrossEntropy

STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocab",
    "colwise_gather_output": "vocab",
    "replicated_with_grad_allreduce": "column",
    "replicate": "replicate",
}
"""transformers' styles by ours. A layer whose outputs it gathers is the output layer, whose loss
takes split logits here."""

HIDDEN_EVERY = 7
"""A masked model predicts every seventh token, which it sees as token 0."""


def build(config: str, task: str = "causal", **sizes: object) -> nn.Module:
    """Build a model with random weights whose forward(inputs, targets) returns the mean loss.

    config: a model_type such as llama, or a folder with a config.json. task: "causal" predicts each
    next token, "masked" hidden ones, "seq2seq" the second half of a sequence from its first. sizes:
    the config's own keys. Dropout is off unless given, so that all cells train alike.
    """
    if task not in TASKS:
        raise ConfigError(
            f"model.factory_args.task={task!r} is unknown; allowed: {', '.join(TASKS)}"
        )
    wrap, make = TASKS[task]
    return wrap(make(read_config(config, sizes)))


def read_config(name: str, sizes: dict[str, object]) -> PretrainedConfig:
    """Read a config by model_type or folder and set its keys; ConfigError names unknown ones."""
    if Path(name).is_dir():
        read = partial(AutoConfig.from_pretrained, name, local_files_only=True)
    elif name in CONFIG_MAPPING:
        # Special tokens of a vocabulary that is not there.
        read = partial(AutoConfig.for_model, name, bos_token_id=None, eos_token_id=None)
    else:
        close = difflib.get_close_matches(name, list(CONFIG_MAPPING), n=3)
        raise ConfigError(
            f"model.config={name!r} is neither a folder with a config.json nor a model_type of "
            f"transformers; close ones: {', '.join(close) or 'none'}"
        )
    usual = read()
    known = usual.to_dict()
    for key in sizes:
        if not hasattr(usual, key):
            raise ConfigError(
                f"model.factory_args.{key} is no key of {type(usual).__name__}; it has "
                f"{', '.join(sorted(known))}"
            )
    no_dropout = {k: 0.0 for k, v in known.items() if "drop" in k and isinstance(v, float)}
    config: PretrainedConfig = read(**{"use_cache": False, **no_dropout, **sizes})
    return config


class LanguageModel(nn.Module):
    """Any model with logits, and the loss for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = CrossEntropy()
        config: Any = model.config
        self.balance_weight = float(getattr(config, "router_aux_loss_coef", 0.0))

    def mean_loss(self, output: Any, targets: Tensor) -> Tensor:
        """Return the mean over tokens; routers that balance their experts add their own part."""
        loss: Tensor = self.loss(output.logits, targets)
        balance: Tensor | None = getattr(output, "aux_loss", None)
        return loss if balance is None else loss + self.balance_weight * balance


class Causal(LanguageModel):
    """Predicts each next token."""

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return self.mean_loss(self.model(input_ids=inputs_BT), targets_BT)

    def tensor_plan(self) -> dict[str, str]:
        """Translate the model's own tp_plan; {} where it ships none. Logits stay split."""
        shipped: dict[str, str] = getattr(self.model, "_tp_plan", None) or {}
        config: Any = self.model.config
        gathers = "colwise_gather_output"
        unknown = sorted(
            {
                style
                for pattern, style in shipped.items()
                if style not in STYLES or (style == gathers and pattern != "lm_head")
            }
        )
        if unknown:
            raise ConfigError(
                f"{config.model_type}'s tp_plan has styles that are not built here: "
                f"{', '.join(unknown)} (built: {', '.join(STYLES)}); write one as parallel.plan"
            )
        drops = {k: v for k, v in config.to_dict().items() if "drop" in k and v}
        if shipped and drops:
            raise ConfigError(
                f"model.factory_args sets {drops}: masks inside a Hugging Face model would be "
                "alike on all tp ranks; leave dropout off with parallel.tp above 1"
            )
        plan = {f"model.{pattern}": STYLES[style] for pattern, style in shipped.items()}
        if plan.get("model.lm_head") == "vocab":
            plan["loss"] = "vocab"
        return plan

    def tensor_heads(self) -> dict[str, int]:
        """Say how many heads the outputs of attention's linears are."""
        config: Any = self.model.config
        queries = config.num_attention_heads
        keys = getattr(config, "num_key_value_heads", None) or queries
        by_name = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "query_key_value": queries}
        return {
            pattern: by_name[leaf]
            for pattern in self.tensor_plan()
            if (leaf := pattern.rpartition(".")[2]) in by_name
        }


class Masked(LanguageModel):
    """Predicts tokens that it does not see, from both sides."""

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        positions_T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        hidden_T = positions_T % HIDDEN_EVERY == HIDDEN_EVERY // 2
        output = self.model(input_ids=inputs_BT.masked_fill(hidden_T, 0))
        output.logits = output.logits[:, hidden_T]
        return self.mean_loss(output, inputs_BT[:, hidden_T])


class SequenceToSequence(LanguageModel):
    """Reads the first half and predicts the second, token by token."""

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        half = inputs_BT.shape[1] // 2
        output = self.model(
            input_ids=inputs_BT[:, :half], decoder_input_ids=inputs_BT[:, half:], use_cache=False
        )
        return self.mean_loss(output, targets_BT[:, half:])


TASKS: dict[str, tuple[type[LanguageModel], Callable[[PretrainedConfig], nn.Module]]] = {
    "causal": (Causal, AutoModelForCausalLM.from_config),
    "masked": (Masked, AutoModelForMaskedLM.from_config),
    "seq2seq": (SequenceToSequence, AutoModelForSeq2SeqLM.from_config),
}
