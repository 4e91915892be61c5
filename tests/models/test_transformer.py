"""The transformer computes what its papers say, in both flavours."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayzero.config.model import Checkpointing, Flavour, ModelConfig
from rayzero.models.attention import Attention
from rayzero.models.init import Initializer, materialize
from rayzero.models.rotary import angles, rotate
from rayzero.models.transformer import Transformer

GPT2 = ModelConfig(hidden=32, ffn_hidden=48, vocab_size=50, max_seq_len=16)
LLAMA = replace(GPT2, flavour=Flavour.LLAMA, num_kv_heads=2, tied_output=False)
BOTH = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])


def build(config: ModelConfig) -> Transformer:
    """Return the model with its initial weights in fp64."""
    with torch.device("meta"):
        model = Transformer(config)
    materialize(model, Initializer(config, 0), device=torch.device("cpu"), dtype=torch.float64)
    return model


def tokens(config: ModelConfig) -> Tensor:
    """Return two sequences of ten tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (2, 10), generator=generator)


@BOTH
def test_a_token_never_sees_later_ones(config: ModelConfig) -> None:
    model, inputs = build(config), tokens(config)
    changed = inputs.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % config.vocab_size
    before, after = model(inputs), model(changed)
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-12)
    assert not torch.allclose(before[:, 6], after[:, 6], atol=1e-6)


@BOTH
def test_the_order_of_earlier_tokens_matters(config: ModelConfig) -> None:
    model, inputs = build(config), tokens(config)
    swapped = inputs[:, [1, 0, *range(2, 10)]]
    assert not torch.allclose(model(inputs)[:, -1], model(swapped)[:, -1], atol=1e-9)


@BOTH
def test_loss_is_the_mean_cross_entropy_of_the_logits(config: ModelConfig) -> None:
    model, inputs = build(config), tokens(config)
    logits = model(inputs[:, :-1])
    by_hand = -logits.log_softmax(-1).gather(-1, inputs[:, 1:, None]).mean()
    assert math.isclose(model(inputs[:, :-1], inputs[:, 1:]).item(), by_hand.item(), rel_tol=1e-12)


def test_a_bf16_model_takes_its_loss_in_fp32() -> None:
    model, inputs = build(GPT2).to(torch.bfloat16), tokens(GPT2)
    loss = model(inputs[:, :-1], inputs[:, 1:])
    exact = F.cross_entropy(model(inputs[:, :-1]).float().flatten(0, 1), inputs[:, 1:].flatten())
    assert loss.dtype is torch.float32
    assert torch.equal(loss, exact)


@pytest.mark.parametrize("mode", [Checkpointing.FULL, Checkpointing.SELECTIVE])
@BOTH
def test_checkpointing_gives_the_same_gradients_bit_for_bit(
    config: ModelConfig, mode: Checkpointing
) -> None:
    plain, recomputing = build(config), build(replace(config, checkpointing=mode))
    inputs = tokens(config)
    for model in (plain, recomputing):
        model(inputs[:, :-1], inputs[:, 1:]).backward()
    for (name, a), b in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize(
    ("mode", "forwards"),
    [(Checkpointing.NONE, 1), (Checkpointing.SELECTIVE, 1), (Checkpointing.FULL, 2)],
)
def test_only_full_checkpointing_runs_a_block_twice(mode: Checkpointing, forwards: int) -> None:
    model, calls = build(replace(GPT2, checkpointing=mode)), []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model(tokens(GPT2), tokens(GPT2)).backward()
    assert len(calls) == forwards


def saved_bytes(config: ModelConfig) -> int:
    """Return the bytes that one forward keeps for backward, parameters aside."""
    model, kept = build(config), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(tokens(config), tokens(config))
    assert loss.requires_grad
    return sum(kept.values())


def test_full_checkpointing_keeps_far_less_for_backward() -> None:
    deep = replace(GPT2, num_layers=8)
    full = replace(deep, checkpointing=Checkpointing.FULL)
    assert saved_bytes(full) < 0.3 * saved_bytes(deep)


def test_grouped_queries_equal_heads_whose_keys_and_values_are_repeated() -> None:
    grouped = build(LLAMA).blocks[0].attention
    single = Attention(replace(LLAMA, num_kv_heads=None)).to(torch.float64)
    with torch.no_grad():
        for name in ("q", "o"):
            getattr(single, name).weight.copy_(getattr(grouped, name).weight)
        for name in ("k", "v"):
            heads = getattr(grouped, name).weight.unflatten(0, (2, LLAMA.head_dim))
            getattr(single, name).weight.copy_(heads.repeat_interleave(2, dim=0).flatten(0, 1))
    x_BTD = torch.randn(2, 7, LLAMA.hidden, dtype=torch.float64)
    angles_TR = angles(7, LLAMA.head_dim, x_BTD.device)
    assert torch.allclose(grouped(x_BTD, angles_TR), single(x_BTD, angles_TR), atol=1e-12)


def test_attention_is_softmax_of_scaled_scores() -> None:
    attention = build(GPT2).blocks[0].attention
    x_BTD = torch.randn(1, 5, GPT2.hidden, dtype=torch.float64)
    q, k, v = (
        m(x_BTD).view(5, 4, 8).transpose(0, 1) for m in (attention.q, attention.k, attention.v)
    )
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    by_hand = attention.o((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    assert torch.allclose(attention(x_BTD)[0], by_hand, atol=1e-12)


def test_rotary_scores_depend_on_distance_alone() -> None:
    q_BTHK, k_BTHK = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 12, 1, 8)
    turns = angles(12, 8, q_BTHK.device).to(torch.float64)
    q, k = rotate(q_BTHK, turns)[0, :, 0], rotate(k_BTHK, turns)[0, :, 0]
    scores = q @ k.T
    for distance in range(-11, 12):
        along = scores.diagonal(distance)
        # The angles are fp32: 11 radians are exact to 1e-6.
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-5)
    assert (scores[0, 0] - scores[0, 5]).abs() > 1e-3


def test_fewer_heads_in_the_projections_are_what_attention_computes_with() -> None:
    """A tensor-parallel rank holds the first heads: its partial sums are theirs."""
    whole = build(GPT2).blocks[0].attention
    part = build(GPT2).blocks[0].attention
    with torch.no_grad():
        whole.o.weight[:, 16:] = 0.0
    for name in ("q", "k", "v"):
        linear = getattr(part, name)
        linear.weight = nn.Parameter(linear.weight[:16])
        linear.bias = nn.Parameter(linear.bias[:16])
    part.o.weight = nn.Parameter(part.o.weight[:, :16])
    x_BTD = torch.randn(2, 7, GPT2.hidden, dtype=torch.float64)
    assert torch.allclose(part(x_BTD), whole(x_BTD), atol=1e-12)
