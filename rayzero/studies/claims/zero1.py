"""Claims 1 to 10: stage 1."""

from fractions import Fraction

from rayzero.records import Kind, Phase
from rayzero.studies.claims.claim import Claim
from rayzero.studies.claims.lab import Lab
from rayzero.studies.claims.readings import (
    BILLION,
    MANY,
    OPTIMIZER,
    calls,
    elements,
    held,
    saved,
    sent_over_ring,
    states_GB,
    volume,
)
from rayzero.studies.claims.trial import states, watched
from rayzero.studies.claims.verdict import Part, Statement, about, at_least, at_most
from rayzero.theory.paper import CONVENTIONS, FP32, GB, states_per_param

PAPER = CONVENTIONS[16]
IN_FP32 = "all in fp32, no master copy"


def state_bytes_sent(lab: Lab) -> int:
    """Bytes of master copies and moments in any transfer of a step at stages 1 to 3."""
    return sum(o.state_bytes_sent for stage in (1, 2, 3) for o in lab.observations(watched(stage)))


def _all_kinds_travel(lab: Lab) -> list[Part]:
    gathered = elements(lab, states(4, 3), "all_gather", Phase.FORWARD)
    reduced = elements(lab, states(4, 3), "reduce_scatter")
    return [
        Statement(
            literal=[at_least("bytes of optimizer states sent", state_bytes_sent(lab), 1)],
            convention=[
                about("parameters gathered in a forward, of all", gathered, 1),
                about("gradients reduce-scattered, of all", reduced, 1),
            ],
            under="parameters and gradients alone",
        )
    ]


def _only_moments(lab: Lab) -> list[Part]:
    share = held(lab, states(4, 1), Kind.MASTER) / held(lab, states(4, 0), Kind.MASTER)
    return [Statement(literal=[about("share of the master copy on each of 4 ranks", share, 1)])]


def _own_share(lab: Lab) -> list[Part]:
    figures = []
    for world in (2, 4, 8):
        share = held(lab, states(world, 1), *OPTIMIZER) / held(lab, states(world, 0), *OPTIMIZER)
        figures.append(
            about(f"optimizer bytes on each of {world}, times {world}", share * world, 1)
        )
    return [Statement(literal=figures)]


def _whole(lab: Lab) -> list[Part]:
    one, zero = states(4, 1), states(4, 0)
    return [
        Statement(
            literal=[
                about(f"share of {kind.value}", held(lab, one, kind) / held(lab, zero, kind), 1)
                for kind in (Kind.PARAMETERS, Kind.GRADIENTS)
            ]
        )
    ]


def _saves_eight(lab: Lab) -> list[Part]:
    mixed = saved(lab, states(4, 1), stage_0=states(4, 0))
    fp32 = FP32.total - states_per_param(FP32, stage=1, shards=1024)
    measured = saved(lab, states(4, 1, "fp32"), stage_0=states(4, 0, "fp32"))
    return [
        Statement(
            literal=[about("bytes per parameter saved, mixed, 4 ranks", mixed, 8)],
            convention=[
                about("bytes per parameter saved, 1024 ranks", fp32, 8),
                about("measured on 4 ranks, over (N-1)/N", measured * Fraction(4, 3), 8),
            ],
            under=IN_FP32,
        )
    ]


def _states_of_13b(shards: int, claimed: int) -> list[Part]:
    mixed, fp32 = (Fraction(13 * c.optimizer, shards) for c in (PAPER, FP32))
    what = f"GB of optimizer states of 13B on {shards} rank(s)"
    return [
        Statement(
            literal=[about(f"{what}, mixed precision", mixed, claimed)],
            convention=[about(what, fp32, claimed)],
            under=IN_FP32,
        )
    ]


def _one_gather_at_start(lab: Lab) -> list[Part]:
    each_step = calls(lab, states(4, 1), "all_gather") + calls(lab, states(4, 1), "reduce_scatter")
    return [
        Statement(
            literal=[
                at_most("collectives in each later step", each_step, 0),
                at_least("bytes of optimizer states sent", state_bytes_sent(lab), 1),
            ]
        )
    ]


def _tiny(lab: Lab) -> list[Part]:
    ratio = volume(lab, states(4, 1)) / volume(lab, states(4, 0))
    each = sent_over_ring(lab, states(4, 1))
    return [
        Statement(
            literal=[
                about("bytes per parameter and step, over (N-1)/N", each, 2),
                at_most("volume over that of plain data parallelism", ratio, Fraction(1, 10)),
            ]
        )
    ]


def seven_on_24(lab: Lab) -> list[Part]:
    """Stage 1, 7B, cards of 24 GB: in the limit, and from bytes measured on 8 ranks."""
    measured = held(lab, states(8, 1), *OPTIMIZER, Kind.PARAMETERS, Kind.GRADIENTS)
    limit = states_GB(PAPER, 7, stage=1, shards=MANY)
    return [
        Statement(
            literal=[
                at_most("GB of states per rank, however many ranks", limit, 24),
                at_most("GB at the bytes measured on 8 ranks", 7 * BILLION * measured / GB, 24),
            ]
        )
    ]


CLAIMS = (
    Claim(
        number=1,
        text="Whatever is sharded (parameters, gradients, optimizer states) is gathered on need.",
        decide=_all_kinds_travel,
        note="The transports were handed no buffer that overlaps a master copy or a moment.",
    ),
    Claim(
        number=2,
        text="Stage 1 shards Adam's two moments and nothing else.",
        decide=_only_moments,
        note="In mixed precision the fp32 master copy is sharded with them.",
    ),
    Claim(
        number=3,
        text="At stage 1 a rank holds 1/N of the optimizer states.",
        decide=_own_share,
    ),
    Claim(
        number=4, text="At stage 1 parameters and gradients are whole on each rank.", decide=_whole
    ),
    Claim(number=5, text="Stage 1 saves some 8 bytes per parameter.", decide=_saves_eight),
    Claim(
        number=6,
        text="The optimizer states of 13B parameters take 104 GB.",
        decide=lambda lab: _states_of_13b(1, 104),
    ),
    Claim(
        number=7,
        text="Of these, each of 8 ranks holds 13 GB.",
        decide=lambda lab: _states_of_13b(8, 13),
    ),
    Claim(
        number=8,
        text="Stage 1 communicates once: it gathers optimizer states when training starts.",
        decide=_one_gather_at_start,
    ),
    Claim(
        number=9,
        text="Stage 1 sends next to nothing: about 2 bytes per parameter.",
        decide=_tiny,
        note="It sends 2 elements per parameter and step, as plain data parallelism does. "
        "DeepSpeed's default path reduces with all-reduce and sends 3.",
    ),
    Claim(
        number=10,
        text="With stage 1 a 7B model trains on cards of 24 GB.",
        decide=seven_on_24,
    ),
)
