"""ZeRO-R's residual states and ZeRO-Offload's placements."""

from fractions import Fraction

from rayzero.report.paper_table import Number, PaperRow, PaperTable
from rayzero.studies.asked import Asked
from rayzero.studies.evidence import Evidence, padding_elements, sums_of
from rayzero.studies.facts import Fact, read_facts
from rayzero.studies.volume_tables import OTHERS, tp_transfers
from rayzero.theory.paper import CONVENTIONS, GB, activation_elements

HALF = 2
"""Bytes of a 16-bit element."""
BILLION = 10**9


def zero_r(evidence: Evidence) -> PaperTable:
    """Activations partitioned (Pa), constant buffers (CB), defragmentation (MD)."""
    ours = tp_transfers(evidence, "full")
    last = "this engine does not repeat the recomputation's last all-reduce"
    gpt2 = activation_elements(layers=48, hidden=1600, batch=32, seq=1024) * HALF
    large = activation_elements(layers=125, hidden=8192, batch=32, seq=1024) * HALF
    answers: list[tuple[Number | None, Number | None, str]] = [
        (6, ours, last),
        (12, None if ours is None else 2 * ours, last),
        (Fraction(100, 12), None, "percent of the row above; Pa is not built in this engine"),
        (Fraction(33, 16), None, "GB; the paper's 33 is half of its own formula's value"),
        (2, None, "times the partitioned checkpoint: down and up"),
        (Fraction(gpt2, GB), None, "printed rounded"),
        (Fraction(gpt2, 12 * GB), None, "the printed 8 holds a working set on top"),
        (Fraction(large, 12 * GB), None, "printed 60: not reproduced by one checkpoint a layer"),
        (Fraction(100, 3), None, "percent; printed rounded"),
        (Fraction(4 * 3 * BILLION, GB), None, ""),
        (Fraction(4 * 3 * BILLION, 2 * GB), None, ""),
        (None, None, "an observation without a formula"),
    ]
    rows = []
    for fact, (formula, dryrun, reason) in zip(read_facts("zero_r_formulas"), answers, strict=True):
        printed = fact["value_printed"]
        is_plain = printed.isdigit()
        rows.append(
            PaperRow(
                facts=fact,
                printed=Fraction(printed) if is_plain else None,
                formula=formula,
                dryrun=dryrun,
                reason=reason,
            )
        )
    return PaperTable(
        name="zero_r_formulas",
        title="ZeRO-R: activations, buffers, fragmentation",
        unit="as each row says",
        printed_column="value_printed",
        rule="dryrun: counted in the engine's ledger, tp 4, full checkpointing.",
        rows=rows,
    )


PLACEMENTS = {
    ("GPU", "GPU", "GPU"): Asked(model="7.5B", world=1, stage=0),
    ("GPU", "GPU", "CPU"): Asked(model="7.5B", world=2, stage=1, offload="host"),
    ("GPU", "CPU", "CPU"): Asked(model="7.5B", world=2, stage=2, offload="host"),
}
"""Where fp16 parameters, fp16 gradients and the update are; which cell of ours places them so."""


def offload_strategies(evidence: Evidence) -> PaperTable:
    """ZeRO-Offload's placements: what stays on the device, what crosses to the host."""
    rows = [_placement(fact, evidence) for fact in read_facts("zero_offload_strategies")]
    return PaperTable(
        name="zero_offload_strategies",
        title="ZeRO-Offload: bytes per parameter on the device by placement",
        unit="bytes per parameter",
        printed_column="gpu_memory_bytes_per_param",
        rule="dryrun: stage 1 or 2 with offload.optimizer=host, device bytes of states alone. At "
        "stage 1 gradients stay whole on the device.",
        rows=rows,
    )


def _placement(fact: Fact, evidence: Evidence) -> PaperRow:
    places = (fact["param16"], fact["grad16"], fact["optimizer_update"])
    if "" in places:
        return PaperRow(facts=fact, reason=OTHERS)
    paper = CONVENTIONS[16]
    sizes = (paper.params, paper.grads, paper.optimizer)
    on_device = sum(size for size, place in zip(sizes, places, strict=True) if place == "GPU")
    asked = PLACEMENTS.get(places)
    report = None if asked is None else evidence.played(asked)
    dryrun = padding = None
    if report is not None and asked is not None:
        sums = sums_of(report.num_params, report.after_step, ())
        dryrun = Fraction(sums.device_states_bytes, sums.num_params)
        padding = Fraction(on_device * padding_elements(asked), sums.num_params)
    return PaperRow(
        facts=fact,
        printed=Fraction(fact["gpu_memory_bytes_per_param"]),
        formula=on_device,
        formula_exact=on_device if asked else None,
        dryrun=dryrun,
        dryrun_padding=padding,
        reason="" if asked else "gradients on the host with the update on the device: not offered",
    )
