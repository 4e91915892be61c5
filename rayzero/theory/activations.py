"""Bytes of activations that a transformer keeps for backward: Korthikanti et al.'s family.

arXiv:2205.05198: 16-bit activations, dropout masks of one byte, attention scores kept (no fused
kernel), GELU feed-forward of 4h. s tokens, b sequences, h hidden, a heads, t tensor-parallel ranks,
L layers, p pipeline stages, m interleaved chunks per stage. A layer of this engine's gpt2 flavour
keeps what stands for selective recomputation, as SDPA keeps no scores; without dropout less its two
masks; and the statistics of two norms and of attention: `kept_layer_bytes` counts both flavours to
the byte. What other models keep is another count; the dry run measures that.
"""

from dataclasses import dataclass
from fractions import Fraction

from rayzero.config.model import Checkpointing, Flavour, ModelConfig
from rayzero.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One transformer layer on one rank. sequence_parallel splits over t what TP leaves whole."""

    seq: int
    batch: int
    hidden: int
    heads: int
    tp: int = 1
    sequence_parallel: bool = False
    checkpointing: Checkpointing = Checkpointing.NONE

    def __post_init__(self) -> None:
        if self.heads % self.tp:
            raise ConfigError(
                f"tp={self.tp} does not divide heads={self.heads}; take a divisor of heads"
            )


def layer_activation_bytes(layer: Layer) -> Fraction:
    """Bytes of one layer per rank and micro-batch (arXiv:2205.05198, eqs. 1-4 and table 2).

    Of s b h (34 + 5 a s / h): 24 and the scores' 5 a s / h are split over t, 10 (norms' inputs and
    dropouts outside) only with sequence parallelism. Selective recomputation drops the scores;
    full keeps the layer's input, 2 s b h, which Megatron leaves whole on every rank.
    """
    sbh = layer.seq * layer.batch * layer.hidden
    if layer.checkpointing is Checkpointing.FULL:
        return Fraction(2 * sbh)
    scores = Fraction(5 * layer.heads * layer.seq, layer.hidden)
    if layer.checkpointing is Checkpointing.SELECTIVE:
        scores = Fraction(0)
    whole = Fraction(10, layer.tp if layer.sequence_parallel else 1)
    return sbh * (whole + Fraction(24, layer.tp) + scores / layer.tp)


def kept_layer_bytes(
    model: ModelConfig,
    *,
    seq: int,
    batch: int,
    itemsize: int,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> int:
    """Bytes that one layer of our models keeps on a rank: the exact count for SDPA, no dropout.

    As torch's CPU kernels keep them, in activations of `itemsize` bytes. Split over tp: queries,
    keys, values, attention's output (also the input of its output layer), its fp32 logarithms of
    sums, one a head and token, and the feed-forward's inner tensors: 2 (GELU: before and after) or
    4 (SwiGLU). Split with sequence parallelism only: each norm's input and output. LayerNorm adds
    two statistics a token; RMSNorm one, and keeps its input and what it normalised in fp32. Rotary
    keeps its cosines and sines, for queries and for keys. Selective recomputation drops the
    logarithms, full all but the layer's input. Raise ConfigError with dropout, whose attention
    keeps scores, and with fused_qkv, whose queries are copied.
    """
    if model.dropout or model.fused_qkv:
        raise ConfigError(
            f"model.dropout={model.dropout} model.fused_qkv={model.fused_qkv}: counted are layers "
            "without dropout and with separate projections; the dry run measures others"
        )
    tokens = seq * batch
    own = tokens // tp if sequence_parallel else tokens
    if model.checkpointing is Checkpointing.FULL:
        return own * model.hidden * itemsize
    is_gpt2 = model.flavour is Flavour.GPT2
    kv_width = max(model.kv_heads // tp, 1) * model.head_dim
    inner = (2 if is_gpt2 else 4) * model.ffn // tp
    kept = tokens * (2 * model.hidden // tp + 2 * kv_width + inner) * itemsize
    if model.checkpointing is Checkpointing.NONE:
        kept += tokens * model.num_heads // tp * 4
    if is_gpt2:
        return kept + 2 * own * (2 * model.hidden + 2) * itemsize
    wide = max(itemsize, 4)
    norms = 2 * own * (model.hidden * (2 * wide + itemsize) + wide)
    return kept + norms + 4 * seq * (model.head_dim // 2) * itemsize


def layers_on_first_stage(num_layers: int, *, stages: int = 1, chunks: int = 1) -> Fraction:
    """Layers' worth of activations that a pipeline's first stage keeps (section 4.2.3).

    With 1F1B p micro-batches of L/p layers: L. Interleaved in m > 1 chunks L (1 + (p-1)/(p m)).
    """
    if chunks == 1:
        return Fraction(num_layers)
    return num_layers * (1 + Fraction(stages - 1, stages * chunks))


def ends_activation_bytes(layer: Layer, *, stages: int, vocab: int) -> Fraction:
    """Bytes outside the layers on the first stage, with sequence parallelism (eqs. 5 and 6).

    The embedding's dropout for p micro-batches, and without a pipeline the last norm's input, the
    output layer's input and the fp32 logits: s b h / t (p + 4 (1 + v/h) if p = 1).
    """
    sbh = Fraction(layer.seq * layer.batch * layer.hidden, layer.tp)
    last = 4 * (1 + Fraction(vocab, layer.hidden)) if stages == 1 else 0
    return sbh * (stages + last)
