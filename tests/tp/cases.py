"""Small models for tensor-parallel tests, whole and cut."""

from dataclasses import replace

import torch
from torch import Tensor

from rayzero.config.model import Flavour, ModelConfig
from rayzero.dist.comm import Communicator
from rayzero.layout.spec import TpShard
from rayzero.models.init import Initializer, materialize
from rayzero.models.transformer import Transformer
from rayzero.parallel.apply import apply
from rayzero.parallel.plans import transformer_heads, transformer_plan

SMALL = ModelConfig(hidden=32, num_heads=8, ffn_hidden=48, vocab_size=64, max_seq_len=16)
LLAMA = replace(SMALL, flavour=Flavour.LLAMA, tied_output=False)
MODELS = {
    "gpt2 tied": SMALL,
    "gpt2 untied": replace(SMALL, tied_output=False),
    "llama tied": replace(LLAMA, tied_output=True, vocab_size=61, label_smoothing=0.1),
    "llama grouped queries": replace(LLAMA, num_kv_heads=4),
    "llama fused": replace(LLAMA, num_kv_heads=4, fused_qkv=True),
    "gpt2 two key heads": replace(SMALL, num_kv_heads=2),
}


def batch_of(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return 3 sequences of 12 tokens and their targets, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    tokens_BT = torch.randint(config.vocab_size, (3, 13), generator=generator)
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def whole_model(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    """Return the model as one process has it, biases and norms moved off their constants."""
    with torch.device("meta"):
        model = Transformer(config)
    materialize(model, Initializer(config, 0), device=torch.device("cpu"), dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += (0.1 * noise).to(dtype)
    return model


def cut(
    model: Transformer, config: ModelConfig, comm: Communicator, *, sequence: bool = False
) -> dict[str, TpShard]:
    """Cut a model of ours in place."""
    plan, heads = transformer_plan(config), transformer_heads(config)
    return apply(model, plan, comm, heads=heads, sequence=sequence)


def cut_model(
    config: ModelConfig, dtype: torch.dtype, comm: Communicator, *, sequence: bool = False
) -> tuple[Transformer, dict[str, TpShard]]:
    """Return this rank's part of the same model."""
    model = whole_model(config, dtype)
    return model, cut(model, config, comm, sequence=sequence)


def block_of(whole: Tensor, shard: TpShard | None) -> Tensor:
    """Return the part of a whole tensor that a shard stands for."""
    if shard is None:
        return whole
    padding = -whole.shape[shard.dim] % shard.count
    padded = torch.cat((whole, whole.new_zeros(padding, *whole.shape[1:]))) if padding else whole
    return padded.chunk(shard.count, shard.dim)[shard.index]
