"""Claims 22 to 29: stage 3."""

from fractions import Fraction

from rayzero.records import Kind, Phase
from rayzero.studies.claims.claim import Claim
from rayzero.studies.claims.lab import AT_13B, Lab
from rayzero.studies.claims.readings import (
    OPTIMIZER,
    data_transfers,
    elements,
    held,
    saved,
    sent_over_ring,
    states_GB,
    volume,
)
from rayzero.studies.claims.trial import (
    LARGEST_KEPT,
    SMALLEST_KEPT,
    WORLDS,
    accumulated,
    persistent,
    states,
)
from rayzero.studies.claims.verdict import (
    Constant,
    Figure,
    Part,
    Statement,
    about,
    at_least,
    at_most,
    exactly,
)
from rayzero.studies.claims.zero1 import IN_FP32, PAPER
from rayzero.studies.claims.zero2 import default_of, exposed
from rayzero.studies.facts import read_facts
from rayzero.theory.memory import STATES
from rayzero.theory.paper import GB, hiding_link_rate

BITS = 8
TABLE = 50_000 * 4096
"""Elements of a usual token table."""


def link_rates(claimed_Gbps: int) -> Constant:
    """The link rate that hides stage 3, for the settings of published runs; claimed within 10%."""
    cases = []
    for row in read_facts("zero3_bandwidth_condition"):
        rate = hiding_link_rate(
            flops_per_s=float(row["achieved_tflops_per_gpu"]) * 1e12,
            tokens=int(row["tokens_per_gpu_per_micro_step"]),
            nodes=int(row["nodes"]),
            recompute=row["recompute"] == "yes",
        )
        cases.append(about(row["gpu"], rate * BITS / GB, claimed_Gbps, percent=10))
    return Constant(what="Gb/s into a node that hide stage 3", cases=cases)


def _all_sharded(lab: Lab) -> list[Part]:
    figures = []
    for world in WORLDS:
        for name, kinds in (
            ("parameters", (Kind.PARAMETERS,)),
            ("gradients", (Kind.GRADIENTS,)),
            ("optimizer states", OPTIMIZER),
        ):
            share = held(lab, states(world, 3), *kinds) / held(lab, states(world, 0), *kinds)
            figures.append(about(f"{name} on each of {world}, times {world}", share * world, 1))
    return [Statement(literal=figures)]


def _split(lab: Lab, precision: str) -> list[Figure]:
    trial = states(4, 0, precision)
    claimed = ((4, (Kind.PARAMETERS,)), (4, (Kind.GRADIENTS,)), (8, OPTIMIZER))
    return [
        about(f"bytes of {kinds[0].value} per parameter", held(lab, trial, *kinds), right)
        for right, kinds in claimed
    ]


def _saves_sixteen(lab: Lab) -> list[Part]:
    figures = []
    for precision in ("paper", "fp32"):
        trials = states(4, 3, precision), states(4, 0, precision)
        measured = saved(lab, trials[0], stage_0=trials[1]) * Fraction(4, 3)
        figures.append(about(f"bytes saved on 4 ranks over (N-1)/N, {precision}", measured, 16))
    return [
        Statement(literal=figures),
        Statement(literal=_split(lab, "paper"), convention=_split(lab, "fp32"), under=IN_FP32),
    ]


def _thirteen_billion(lab: Lab) -> list[Part]:
    dry = Fraction(lab.played(AT_13B).after_step.bytes_of(*STATES), GB)
    alone, eight = (states_GB(PAPER, 13, stage=3, shards=shards) for shards in (1, 8))
    return [
        Statement(
            literal=[
                about("GB of states on one rank", alone, 208),
                about("GB on each of 8", eight, 26),
                about("GB on each of 8, dry run of a 13B model", dry, 26),
            ]
        )
    ]


def _three_transfers(lab: Lab) -> list[Part]:
    trial = states(4, 3)
    others = max(volume(lab, states(4, stage)) for stage in (0, 1, 2))
    gathers = {p: elements(lab, trial, "all_gather", p) for p in (Phase.FORWARD, Phase.BACKWARD)}
    return [
        Statement(
            literal=[
                about("gathered in forward, of all parameters", gathers[Phase.FORWARD], 1),
                about("gathered in backward", gathers[Phase.BACKWARD], 1),
                about("reduce-scattered", elements(lab, trial, "reduce_scatter"), 1),
                at_least("volume over the largest of stages 0-2", volume(lab, trial) / others, 1.4),
            ]
        )
    ]


def _three_bytes(lab: Lab) -> list[Part]:
    trial = states(4, 3)
    forward = elements(lab, trial, "all_gather", Phase.FORWARD)
    return [
        Statement(
            literal=[
                about("bytes per parameter and step, over (N-1)/N", sent_over_ring(lab, trial), 3)
            ],
            convention=[
                about("elements per parameter", volume(lab, trial), 3),
                about("of these in forward", forward, 1),
                about("of these in backward", volume(lab, trial) - forward, 2),
                about("elements per micro-step of 8", volume(lab, accumulated(3, 8)) / 8, 3),
            ],
            under="counted in elements, as the paper does",
        )
    ]


def _prefetch(lab: Lab) -> list[Part]:
    gains = [
        at_most(row["setup"], int(row["gain_percent"]), 5) for row in read_facts("prefetch_gains")
    ]
    return [
        Statement(
            literal=[at_most("share of a link's latency left by prefetch", exposed(lab, 3), 0.8)]
        ),
        Constant(what="published gain of prefetching in percent, if overlap is hard", cases=gains),
    ]


def _table_gathers(lab: Lab, kept: int) -> int:
    """How often a forward gathers the token table where parameters of `kept` elements stay."""
    transfers = data_transfers(lab.reports(persistent(kept))[0])
    return sum(t.phase is Phase.FORWARD and t.unit.startswith("tokens#") for t in transfers)


def _keeps_large(lab: Lab) -> list[Part]:
    ratio = Fraction(TABLE, default_of("param_persistence_threshold"))
    return [
        Statement(
            literal=[
                *(
                    exactly(
                        f"gathers of the token table, threshold {kept}",
                        _table_gathers(lab, kept),
                        0,
                    )
                    for kept in (SMALLEST_KEPT, LARGEST_KEPT)
                ),
                at_most("a 50k x 4k table over DeepSpeed's threshold", ratio, 1),
            ]
        )
    ]


CLAIMS = (
    Claim(
        number=22,
        text="Stage 3 shards all three kinds; each rank has 1/N of the parameters.",
        decide=_all_sharded,
    ),
    Claim(
        number=23,
        text="Stage 3 saves 16 bytes per parameter, 4 + 4 + 8.",
        decide=_saves_sixteen,
        note="In mixed precision the same 16 are 2 + 2 + 12.",
    ),
    Claim(
        number=24,
        text="Stage 3 brings 13B from 208 GB to 26 GB on each of 8 ranks.",
        decide=_thirteen_billion,
        note="Gathered layers and buffers come on top.",
    ),
    Claim(
        number=25,
        text="Stage 3 communicates most: a gather in forward, one in backward, a reduce-scatter.",
        decide=_three_transfers,
    ),
    Claim(
        number=26,
        text="That is about 3 bytes per parameter: 1 in forward, 2 in backward.",
        decide=_three_bytes,
        note="In 16 bits it is 6 bytes.",
    ),
    Claim(
        number=27,
        text="Sharded parameters make overlap hard; prefetching the next layer hides latency.",
        decide=_prefetch,
    ),
    Claim(
        number=28,
        text="Below 200 Gb/s of InfiniBand stage 3 is bound by communication.",
        decide=lambda lab: [link_rates(200)],
        note="The rate depends on device, tokens and nodes; none is a limit for all.",
    ),
    Claim(
        number=29,
        text="DeepSpeed's persistence threshold keeps large parameters such as embeddings local.",
        decide=_keeps_large,
        note="It keeps those that are at most as large, so the small ones.",
    ),
)
