"""Claims 46 to 54: tuning stage 3, and what becomes of gradients at stage 2."""

from fractions import Fraction

from rayzero.records import Alteration, Kind, Where
from rayzero.studies.claims.claim import Claim
from rayzero.studies.claims.lab import Lab
from rayzero.studies.claims.readings import (
    calls,
    differing,
    held,
    peak,
    sent,
    states_GB,
)
from rayzero.studies.claims.trial import delayed, in_units, offloaded, states, watched
from rayzero.studies.claims.verdict import (
    Part,
    Statement,
    about,
    at_least,
    at_most,
    exactly,
)
from rayzero.studies.claims.zero1 import PAPER
from rayzero.studies.claims.zero2 import default_of, exposed, gradients_computed
from rayzero.theory.memory import STATES
from rayzero.theory.paper import offload_traffic


def _overlaps(lab: Lab) -> list[Part]:
    weights = [
        seen.weights_checksum
        for ahead in (False, True)
        for seen in lab.observations(delayed(2, ahead=ahead))
    ]
    return [
        Statement(
            literal=[
                *(
                    at_most(f"share of latency left at stage {s}", exposed(lab, s), 0.8)
                    for s in (2, 3)
                ),
                exactly("different weights with and without overlap", differing(weights), 1),
            ]
        )
    ]


def _prefetch_size(lab: Lab) -> list[Part]:
    size = default_of("prefetch_bucket_size")
    fewer = Fraction(
        calls(lab, in_units(()), "all_gather"), calls(lab, in_units(None), "all_gather")
    )
    more = Fraction(peak(lab, in_units(())), peak(lab, in_units(None)))
    return [
        Statement(literal=[exactly("stage3_prefetch_bucket_size by default", size, 2 * 10**7)]),
        Statement(
            literal=[
                at_most("gathers of one large piece over those of blocks", fewer, 0.9),
                at_least("peak memory of one large piece over that of blocks", more, 1.1),
            ]
        ),
    ]


def _trades(lab: Lab) -> list[Part]:
    near, far = states(2, 2), offloaded("host")
    freed = held(lab, near, *STATES) - held(lab, far, *STATES, where=Where.DEVICE)
    down = far.world * held(lab, far, Kind.GRADIENTS, where=Where.HOST)
    moved = down + held(lab, far, Kind.PARAMETERS)
    return [
        Statement(
            literal=[
                at_least("bytes per parameter that leave each of 2 devices", freed, 1),
                about(
                    "bytes per parameter between devices and host, all ranks",
                    moved,
                    offload_traffic(PAPER, shards=1),
                ),
            ]
        )
    ]


def _thirty_on_eight(lab: Lab) -> list[Part]:
    needed, freed = states_GB(PAPER, 30, stage=3, shards=8), Fraction(30 * PAPER.optimizer, 8)
    return [
        Statement(
            literal=[
                at_most("GB of states, stage 3, 8 ranks", needed, 40),
                about("GB that offload frees", freed, 10),
            ]
        )
    ]


def _whole_gradient(lab: Lab) -> list[Part]:
    return [
        Statement(literal=[about("share computed on each of 4 ranks", gradients_computed(lab), 1)])
    ]


def _only_the_owners(lab: Lab) -> list[Part]:
    ratio = held(lab, states(4, 0), Kind.GRADIENTS) / held(lab, states(4, 2), Kind.GRADIENTS)
    return [Statement(literal=[about("gradients after all-reduce over those after", ratio, 4)])]


def _no_gather(lab: Lab) -> list[Part]:
    seen = lab.observations(watched(2, Alteration.UNPUBLISHED))
    replicas = differing(o.weights_checksum for o in seen)
    what = "different replicas on 4 ranks without the gather after the step"
    return [Statement(literal=[exactly(what, replicas, 1)])]


def _half(lab: Lab) -> list[Part]:
    ratio = sent(lab, states(4, 0), "all_reduce") / sent(lab, states(4, 2), "reduce_scatter")
    return [Statement(literal=[about("bytes of all-reduce over reduce-scatter", ratio, 2)])]


def _independent(lab: Lab) -> list[Part]:
    each = [sent(lab, states(world, 2), "reduce_scatter") for world in (2, 8)]
    limit = Fraction(1023, 1024) / Fraction(63, 64)
    return [
        Statement(
            literal=[about("bytes per parameter on 8 ranks over 2", each[1] / each[0], 1)],
            convention=[about("(N-1)/N on 1024 ranks over 64", limit, 1)],
            under="for many ranks",
        )
    ]


CLAIMS = (
    Claim(
        number=46,
        text="overlap_comm hides communication; order has to be kept.",
        decide=_overlaps,
        note="Buckets go out in index order on every rank, so no bit changes.",
    ),
    Claim(
        number=47,
        text="stage3_prefetch_bucket_size is 20M unless set; larger: fewer calls, more memory.",
        decide=_prefetch_size,
        note="The trend is that of what this engine gathers as one; how far ahead it gathers "
        "changes no number of calls here.",
    ),
    Claim(
        number=48,
        text="Offloading the optimizer trades memory for time on PCIe.",
        decide=_trades,
    ),
    Claim(
        number=49,
        text="30B on 8 A100-40GB: overlap gains 15%; offload takes 38 to 28 GB for 20% of speed.",
        decide=_thirty_on_eight,
        note="Published gains of overlap are 10-18%, costs of offload from none to half.",
    ),
    Claim(
        number=50,
        text="At stage 2 each rank computes the whole gradient, which is then reduce-scattered.",
        decide=_whole_gradient,
    ),
    Claim(
        number=51,
        text="All-reduce would leave whole gradients; reduce-scatter leaves the owner's part.",
        decide=_only_the_owners,
    ),
    Claim(
        number=52,
        text="Stage 2 needs no gather of parameters, since every rank has them.",
        decide=_no_gather,
    ),
    Claim(
        number=53,
        text="A reduce-scatter is half of an all-reduce.",
        decide=_half,
        note="The gather of parameters brings the sum back to that of an all-reduce.",
    ),
    Claim(
        number=54,
        text="Its volume does not depend on the number of ranks.",
        decide=_independent,
    ),
)
