"""Claims 39 to 45: stage 3 against tensor parallelism."""

from fractions import Fraction

from rayzero.records import Kind
from rayzero.studies.claims.claim import Claim
from rayzero.studies.claims.lab import Lab
from rayzero.studies.claims.readings import (
    block_bytes,
    data_transfers,
    differing,
    held,
    losses,
    most_apart,
    tp_calls,
    volume,
)
from rayzero.studies.claims.trial import (
    FEW_TOKENS,
    MANY_TOKENS,
    Trial,
    accumulated,
    split,
    states,
    watched,
)
from rayzero.studies.claims.verdict import (
    Part,
    Statement,
    about,
    at_least,
    at_most,
    exactly,
)
from rayzero.studies.claims.zero1 import PAPER
from rayzero.studies.facts import read_facts
from rayzero.theory.paper import (
    GB,
    attention_params,
    break_even_same_ranks,
    dense_layer_params,
)

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
HIDDEN_175B = 12288
CARD_GB = 40
ALL_REDUCES = 4
"""Of a layer and micro-step with tensor parallelism."""


def layer_on_a_card(lab: Lab) -> list[Part]:
    """Whether one layer of 175B is too much for a card."""
    per_param = PAPER.params + PAPER.grads
    attention, block = (
        Fraction(count(HIDDEN_175B) * per_param, GB)
        for count in (attention_params, dense_layer_params)
    )
    return [
        Statement(
            literal=[
                at_least("GB of an attention layer, weights and gradients", attention, CARD_GB),
                at_least("GB of the whole block", block, CARD_GB),
            ]
        )
    ]


def _data_parallel(lab: Lab) -> list[Part]:
    seen = lab.observations(watched(3))
    computed = Fraction(min(o.gradient_elements for o in seen), seen[0].num_params)
    apart = most_apart(losses(lab, states(4, 3, "fp32")), losses(lab, states(4, 0, "fp32")))
    batches = differing(o.batch_checksum for o in seen)
    return [
        Statement(
            literal=[
                exactly("different batches on 4 ranks", batches, 4),
                about("share of gradients computed on each", computed, 1),
                exactly("largest difference of loss to stage 0", apart, 0),
            ]
        )
    ]


def _part_of_each_layer(lab: Lab) -> list[Part]:
    whole = held(lab, states(2, 0), Kind.PARAMETERS)
    apart = most_apart(losses(lab, split(2)), losses(lab, states(2, 0)))
    return [
        Statement(
            literal=[
                at_most(
                    f"share of parameters on each of {tp} ranks (tables of positions stay whole)",
                    held(lab, split(tp), Kind.PARAMETERS) / whole,
                    Fraction(1, tp) + Fraction(1, 10),
                )
                for tp in (2, 4)
            ]
            + [at_most("largest difference of loss to one whole model, bf16", apart, 0.01)]
        )
    ]


def _by_gather_and_scatter(lab: Lab) -> list[Part]:
    ops = [t.op for t in data_transfers(lab.reports(states(4, 3))[0])]
    used = sum(op in ("all_gather", "reduce_scatter") for op in ops)
    return [Statement(literal=[exactly("share of calls that are so", Fraction(used, len(ops)), 1)])]


def _point_to_point(lab: Lab) -> list[Part]:
    direct = tp_calls(lab, split(2), lambda t: t.op not in COLLECTIVES)
    plain, again = (
        tp_calls(lab, split(2, mode), lambda t: t.op == "all_reduce") for mode in ("none", "full")
    )
    return [
        Statement(
            literal=[
                at_least("sends and receives of a layer and micro-step", direct, 1),
                at_most("all-reduces of a layer and micro-step", plain, 0),
                at_most("the same with full recomputation", again, 0),
            ]
        )
    ]


def _ratio(lab: Lab, trials: tuple[Trial, Trial]) -> Fraction:
    zero, tensor = trials
    return Fraction(block_bytes(lab, zero, "shard"), block_bytes(lab, tensor, "tp"))


def _speed_of_few() -> Fraction:
    """Published speed of ZeRO-3 over TP and PP where each device has one sequence."""
    speeds = {
        row["scheme"]: Fraction(row["tflops_per_gpu"])
        for row in read_facts("megatron_sc21_table2_zero3_vs_ptd")
        if row["gpus_A100_80GB"] == "1536"
    }
    return speeds["ZeRO-3"] / speeds["PTD-P"]


def _sends_less(lab: Lab) -> list[Part]:
    hidden, tp = 4096, 4
    meets = break_even_same_ranks(
        Fraction(dense_layer_params(hidden)), all_reduces=ALL_REDUCES, hidden=hidden, tp=tp
    )
    published = [
        float(row["median_time_over_pure_dp"])
        for row in read_facts("tp_vs_dp_single_node_summary")
        if row["n_gpus"] == row["tp"] == "8"
    ]
    return [
        Statement(
            literal=[
                at_most("bytes of ZeRO-3 over TP, 32 tokens per rank", _ratio(lab, FEW_TOKENS), 1),
                at_least("published speed of ZeRO-3 over TP and PP, 1536 A100", _speed_of_few(), 1),
            ],
            convention=[
                at_most("the same, 512 tokens per rank", _ratio(lab, MANY_TOKENS), 1),
                at_most(f"tokens per rank where they meet, h {hidden}, t {tp}", meets, 8192),
                at_least("published time of TP 8 over pure DP, 8 A100", published[0], 1),
            ],
            under="with more tokens per rank than where the two meet",
        )
    ]


def _usual_mix(lab: Lab) -> list[Part]:
    sources = {
        row["id"].partition("-")[0]
        for row in read_facts("throughput_sharding")
        if row["sharding"].startswith("ZeRO-1") and "1" not in (row["tp"], row["pp"])
    }
    many = volume(lab, accumulated(2, 8)) / volume(lab, accumulated(1, 8))
    one = volume(lab, states(2, 2)) / volume(lab, states(2, 1))
    return [
        Statement(literal=[at_least("sources with TP, PP and stage 1", len(sources), 2)]),
        Statement(
            literal=[at_most("volume of stage 2 over stage 1, 8 micro-batches", many, 1)],
            convention=[at_most("the same, one micro-batch", one, 1)],
            under="without a pipeline's micro-batches",
        ),
    ]


CLAIMS = (
    Claim(
        number=39,
        text="Stage 3 is data parallelism: each rank computes the whole model on other samples.",
        decide=_data_parallel,
    ),
    Claim(
        number=40,
        text="Model parallelism cuts a layer, and each rank computes its part.",
        decide=_part_of_each_layer,
        note="So for tensor parallelism.",
    ),
    Claim(
        number=41,
        text="Stage 3 communicates by all-gather and reduce-scatter.",
        decide=_by_gather_and_scatter,
    ),
    Claim(
        number=42,
        text="Model parallelism communicates from point to point.",
        decide=_point_to_point,
        note="Tensor parallelism all-reduces; pipelines send from point to point. With full "
        "recomputation this engine repeats one all-reduce of a layer, not two.",
    ),
    Claim(
        number=43,
        text="An attention layer of a 175B model does not fit on one GPU.",
        decide=layer_on_a_card,
    ),
    Claim(
        number=44,
        text="Where a layer fits, stage 3 communicates less than model parallelism.",
        decide=_sends_less,
        note="Bytes are those of the blocks, measured on 2 ranks at the same tokens per step.",
    ),
    Claim(
        number=45,
        text="Model parallelism with stage 1, or with stage 2, is a usual mix.",
        decide=_usual_mix,
        note="Stage 2 reduces in each micro-batch.",
    ),
)
