"""Claims 55 to 63: pitfalls, lines of resumes, references."""

from fractions import Fraction

from rayzero.studies.claims.claim import Claim
from rayzero.studies.claims.lab import Lab
from rayzero.studies.claims.model_parallel import layer_on_a_card
from rayzero.studies.claims.readings import MANY, held, largest_of_blocks
from rayzero.studies.claims.selection import speed_ratios
from rayzero.studies.claims.trial import FSDP2, SMALL, in_units, linears, states
from rayzero.studies.claims.verdict import (
    Analogy,
    Constant,
    Figure,
    Part,
    Statement,
    about,
    at_least,
)
from rayzero.studies.claims.zero1 import PAPER, state_bytes_sent
from rayzero.studies.facts import read_facts
from rayzero.theory.memory import STATES
from rayzero.theory.paper import states_per_param
from rayzero.theory.shapes import shape_of

POST = "Understanding ZeRO-2 and ZeRO-3"
WITH_SOURCES = (
    "throughput_sharding",
    "stage_2_against_3",
    "prefetch_gains",
    "zero_comm_volume",
    "hybrid_sharding_volumes",
    "tp_comm_formulas",
    "zero_bytes_per_param",
)


def _slower(lab: Lab) -> list[Part]:
    cases = [
        Figure(what=setup, value=100 * (1 - 1 / ratio), low=10, high=30)
        for setup, ratio in speed_ratios(lab)
    ]
    return [Constant(what="stage 3 slower than stage 2 by percent", cases=cases)]


def _gathers_states(lab: Lab) -> list[Part]:
    return [
        Statement(literal=[at_least("bytes of optimizer states sent", state_bytes_sent(lab), 1)])
    ]


def _large_layer(lab: Lab) -> list[Part]:
    matrices = max(p.numel for p in shape_of(SMALL).params if p.unit)
    gathered = largest_of_blocks(lab, in_units(linears()))
    return [
        Statement(
            literal=[
                at_least(
                    "largest buffer gathered, linear by linear, over the largest tensor",
                    Fraction(gathered, matrices),
                    1,
                )
            ]
        ),
        *layer_on_a_card(lab),
    ]


def _eighteen_percent(lab: Lab) -> list[Part]:
    rows = [
        row
        for row in read_facts("throughput_sharding")
        if row["gpu"] == "A100" and row["n_gpus"] == "8" and 12 <= float(row["params_B"]) <= 14
    ]
    twos = [row for row in rows if row["sharding"].startswith("ZeRO-2")]
    threes = [row for row in rows if row["sharding"].startswith("ZeRO-3")]
    cases = [
        about(
            f"{two['id']} against {three['id']}",
            float(two["tokens_per_s_per_gpu"]) / float(three["tokens_per_s_per_gpu"]),
            1.18,
        )
        for two in twos
        for three in threes
    ]
    return [Constant(what="speed of stage 2 over stage 3, 13B on 8 A100", cases=cases)]


def _confirmed_on_four(lab: Lab) -> list[Part]:
    ratio = held(lab, states(4, 0), *STATES) / held(lab, states(4, 2), *STATES)
    formula = PAPER.total / states_per_param(PAPER, stage=2, shards=4)
    return [Statement(literal=[about("states of stage 0 over stage 2, 4 ranks", ratio, formula)])]


def _fsdp(lab: Lab) -> list[Part]:
    seen = lab.observations(FSDP2)[0]
    return [
        Statement(
            literal=[
                about(
                    f"{op} of torch's FSDP2, of all parameters",
                    Fraction(seen.collective_elements.get(op, 0), seen.num_params),
                    right,
                )
                for op, right in (("all_gather", 2), ("reduce_scatter", 1))
            ]
        )
    ]


def _cited_post(lab: Lab) -> list[Part]:
    sources = {row["source"] for name in WITH_SOURCES for row in read_facts(name)}
    cases = [Figure(what=source, value=1, low=1) for source in sources if POST in source]
    return [Constant(what=f"of {len(sources)} sources of facts those that are it", cases=cases)]


def _factors(lab: Lab) -> list[Part]:
    figures = [
        about(
            f"stage {stage} in the limit",
            PAPER.total / states_per_param(PAPER, stage=stage, shards=MANY),
            factor,
        )
        for stage, factor in ((1, 4), (2, 8), (3, MANY))
    ]
    for stage in (1, 2, 3):
        measured = held(lab, states(8, 0), *STATES) / held(lab, states(8, stage), *STATES)
        formula = PAPER.total / states_per_param(PAPER, stage=stage, shards=8)
        figures.append(about(f"stage {stage} measured on 8 ranks", measured, formula))
    return [Statement(literal=figures)]


CLAIMS = (
    Claim(
        number=55,
        text="Stage 3 is usually 10-30% slower.",
        decide=_slower,
        note="Claim 32 has other numbers for the same.",
    ),
    Claim(
        number=56,
        text="Stage 1 needs one gather of optimizer states, 2 bytes per parameter.",
        decide=_gathers_states,
    ),
    Claim(
        number=57,
        text="Stage 3 cannot hold a layer larger than a GPU, such as one of 175B.",
        decide=_large_layer,
        note="True of one undivided tensor; smaller units make the gathered piece smaller.",
    ),
    Claim(
        number=58,
        text="13B on 8 A100: stage 2 is 18% faster.",
        decide=_eighteen_percent,
        note="On 40 GB it does not fit, see claim 31.",
    ),
    Claim(
        number=59,
        text="ZeRO pools memory as an operating system's virtual memory does.",
        decide=lambda lab: [Analogy(why="an analogy; no number decides it")],
    ),
    Claim(
        number=60,
        text="Four GPUs suffice to see stage 2's sharding.",
        decide=_confirmed_on_four,
        note="16 against 2 + 14/4 = 5.5 bytes per parameter.",
    ),
    Claim(
        number=61,
        text="FSDP is ZeRO-3.",
        decide=_fsdp,
        note="With full sharding: counted where torch hands collectives to the process group.",
    ),
    Claim(
        number=62,
        text="A vendor's post on the communication overhead of ZeRO-2 and ZeRO-3 is cited.",
        decide=_cited_post,
        note="Not found; do not cite it.",
    ),
    Claim(
        number=63,
        text="Stage 1 saves 4 times, stage 2 8 times, stage 3 N times.",
        decide=_factors,
        note="Limits for many ranks; on 8 ranks 2.9, 4.3 and 8.",
    ),
)
