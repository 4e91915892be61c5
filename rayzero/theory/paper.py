"""Closed forms of the papers, in exact fractions: what theory counts flat by flat, without padding.

Psi parameters, N data-parallel ranks, g micro-steps, t tensor-parallel ranks, h hidden size.
"""

from dataclasses import dataclass
from fractions import Fraction

GB = 10**9
"""The papers' GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """Bytes per parameter: weights, gradients, and K of optimizer state; see
    docs/bytes_per_parameter.md."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes per parameter on one rank alone."""
        return self.params + self.grads + self.optimizer


CONVENTIONS = {
    16: Convention(params=2, grads=2, optimizer=12),
    18: Convention(params=2, grads=4, optimizer=12),
    20: Convention(params=2, grads=2, optimizer=16),
}
"""16: the ZeRO paper. 18: gradients in fp32. 20: ZeRO-Infinity, an fp32 gradient copy in K."""
FP32 = Convention(params=4, grads=4, optimizer=8)
"""All in fp32: no master copy."""


def states_per_param(convention: Convention, *, stage: int, shards: int) -> Fraction:
    """Bytes of model states per parameter and rank (arXiv:1910.02054, section 5 and figure 1)."""
    share = Fraction(1, shards)
    c = convention
    return Fraction(
        c.params * (share if stage >= 3 else 1)
        + c.grads * (share if stage >= 2 else 1)
        + c.optimizer * (share if stage >= 1 else 1)
    )


def largest_model(
    convention: Convention, *, memory_bytes: int, stage: int, shards: int, mp: int
) -> Fraction:
    """Parameters whose states fill a device, times the model-parallel degree (table 2)."""
    return mp * memory_bytes / states_per_param(convention, stage=stage, shards=shards)


def step_volume(*, stage: int, micro_steps: int = 1) -> int:
    """Elements per rank and step over Psi (N-1)/N (arXiv:1910.02054, section 7).

    Stages 0 and 1 reduce once, at the end; 2 and 3 reduce every micro-step.
    """
    g = micro_steps
    return {0: 2, 1: 2, 2: g + 1, 3: 3 * g}[stage]


def dense_layer_params(hidden: int) -> int:
    """Weights of one transformer layer, 12 h^2."""
    return 12 * hidden**2


def break_even_same_ranks(
    layer_elements: Fraction, *, all_reduces: int, hidden: int, tp: int
) -> Fraction:
    """Tokens per rank where ZeRO-3 on t ranks sends as much as TP on them.

    3 P (t-1)/t = 2 n (t T) h (t-1)/t, n all-reduces a layer (arXiv:2104.04473, section 3.2).
    """
    return 3 * layer_elements / (2 * all_reduces * tp * hidden)


def break_even_many_ranks(
    layer_elements: Fraction, *, all_reduces: int, hidden: int, tp: int
) -> Fraction:
    """Tokens per rank where ZeRO-3 on N >> t ranks sends as much as TP t with ZeRO-1 on N/t.

    3 P = 2 n T h (t-1) + 2 P / t.
    """
    rest = layer_elements * (3 - Fraction(2, tp))
    return rest / (2 * all_reduces * hidden * (tp - 1))


def activation_elements(*, layers: int, hidden: int, batch: int, seq: int) -> int:
    """The ZeRO paper's estimate of all activations (section 3.2): 12 h b s a layer."""
    return 12 * layers * hidden * batch * seq


def hiding_link_rate(*, flops_per_s: float, tokens: int, nodes: int, recompute: bool) -> float:
    """Bytes per second into a node that hide stage 3 in 16 bits behind its compute.

    A micro-step brings 6 Psi (1 - 1/k) bytes into each of k nodes (two gathers and a reduction,
    arXiv:1910.02054, section 7.2.2) and takes c Psi T / F seconds on each device, c = 6, or 8 with
    full recomputation: Psi and the devices of a node cancel.
    """
    flops_per_param = 8 if recompute else 6
    return 6 * (1 - 1 / nodes) * flops_per_s / (flops_per_param * tokens)


def offload_traffic(convention: Convention, *, shards: int) -> Fraction:
    """Bytes per parameter and step between a device and its host with the optimizer's states there.

    Gradients go down and weights come up, a rank's own shard of each (arXiv:2101.06840, 4.2).
    """
    return Fraction(convention.grads + convention.params, shards)


def attention_params(hidden: int) -> int:
    """Weights of one attention layer, 4 h^2."""
    return 4 * hidden**2
