"""From measurements to rows: medians over rounds, ratios between engines, verdicts on bounds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayzero.config.bench import PRECISIONS, Contender
from rayzero.config.engine import EngineName
from rayzero.config.peers import NATURES
from rayzero.records import Carrier, CellRecord, Status
from rayzero.report.bench_table import BenchRow, BoundRow, RoundRow
from rayzero.rows import percentile
from rayzero.studies.bench_plan import Setting

LOSS_BOUNDS = {"fp32": 1e-5, "bf16": 2e-3}
"""Largest relative difference from our engine's losses; the same as a sweep's parity."""
NOISE, RSS_NOISE = 1.03, 1.02
COMPUTE = Contender(engine=None, stage=0)
DDP = Contender(engine=EngineName.DDP, stage=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One engine in one setting, its records by round."""

    setting: Setting
    contender: Contender
    records: tuple[CellRecord, ...]

    @property
    def failure(self) -> CellRecord | None:
        """The first round that did not end well."""
        return next((r for r in self.records if r.row.status != Status.OK.value), None)

    @property
    def rounds(self) -> list[list[float]]:
        """Timed steps by round."""
        return [[s.step_s for s in r.samples if s.timed] for r in self.records if r.samples]

    @property
    def losses(self) -> list[float]:
        """All losses of the first round; the others train the same."""
        return [sample.loss for sample in self.records[0].samples] if self.records else []

    @property
    def peak_rss_bytes(self) -> int | None:
        """Median over rounds of the hungriest rank's high-water mark, each in new processes."""
        peaks = [r.row.peak_host_bytes for r in self.records if r.row.peak_host_bytes is not None]
        return int(statistics.median(peaks)) if peaks else None

    @property
    def step_s(self) -> float | None:
        """Median over the steps of all rounds."""
        times = [time for times in self.rounds for time in times]
        return statistics.median(times) if times and self.failure is None else None

    @property
    def keeps_dtypes(self) -> bool:
        """Whether it runs in the dtypes asked for, a master included, so that it can be judged."""
        engine = self.contender.engine
        if engine is None or not engine.is_peer or NATURES[engine].keeps_master:
            return True
        return not PRECISIONS[self.setting.precision].has_master


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Our stages against something, at most these ratios by regime."""

    stages: tuple[int, ...]
    against: str
    communication_heavy: float
    compute_heavy: float
    carriers: tuple[Carrier, ...] = tuple(Carrier)
    """How our gradients must have travelled for it to apply."""


GLOO, MEMORY = (Carrier.NATIVE, Carrier.PAIRWISE), (Carrier.SHARED,)
BOUNDS = (
    Bound(stages=(1,), against="best peer", communication_heavy=0.85, compute_heavy=0.90),
    Bound(
        stages=(2, 3),
        against="best peer",
        communication_heavy=0.55,
        compute_heavy=0.80,
        carriers=GLOO,
    ),
    Bound(
        stages=(2, 3),
        against="best peer",
        communication_heavy=0.45,
        compute_heavy=0.80,
        carriers=MEMORY,
    ),
    Bound(
        stages=(1, 2), against="ddp", communication_heavy=1.05, compute_heavy=1.00, carriers=GLOO
    ),
    Bound(
        stages=(1, 2), against="ddp", communication_heavy=0.95, compute_heavy=0.95, carriers=MEMORY
    ),
    Bound(stages=(3,), against="compute only", communication_heavy=1.8, compute_heavy=1.15),
    Bound(
        stages=(1, 2, 3),
        against="peak RSS of the leanest peer",
        communication_heavy=1.0,
        compute_heavy=1.0,
    ),
)
"""What must be reached, with engines' default settings on one host."""


def rows_of(measured: Sequence[Measured]) -> list[BenchRow]:
    """Return a row for each engine and setting."""
    rows = []
    for setting in dict.fromkeys(m.setting for m in measured):
        field = Field([m for m in measured if m.setting == setting])
        rows += [field.row(m) for m in field.all]
    return rows


class Field:
    """All engines of one setting, to be compared with each other."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        self.all = measured
        self._by_contender = {m.contender: m for m in measured}

    def row(self, m: Measured) -> BenchRow:
        """Compare one engine with the others."""
        setting, failure, step_s = m.setting, m.failure, m.step_s
        row = BenchRow(
            engine=m.contender.name,
            stage=m.contender.stage,
            precision=setting.precision,
            regime=setting.regime.name,
            accumulation=setting.accumulation,
            rounds=len(m.records),
        )
        if failure is not None:
            return replace(row, status=failure.row.status, reason=failure.row.reason)
        if step_s is None:
            return row
        times = [time for times in m.rounds for time in times]
        batch = m.records[0].row
        row = replace(
            row,
            step_s_median=step_s,
            step_s_p95=percentile(times, 0.95),
            tokens_per_s=(batch.global_batch or 0) * (batch.seq_len or 0) / step_s,
            transport=batch.transport,
            peak_rss_bytes=m.peak_rss_bytes,
            steps=len(times),
            ratio_to_ddp=self._ratio(m, self._by_contender.get(DDP)),
            ratio_to_compute=self._ratio(m, self._by_contender.get(COMPUTE)),
        )
        return self._with_parity(self._with_peers(row, m), m)

    def _with_peers(self, row: BenchRow, m: Measured) -> BenchRow:
        peers = [p for p in self._peers(m.contender.stage) if p.step_s is not None]
        if not peers or m.contender.engine is None:
            return row
        best = min(peers, key=lambda p: p.step_s or math.inf)
        pairs = zip(m.rounds, best.rounds, strict=False)
        ratios = [statistics.median(mine) / statistics.median(its) for mine, its in pairs]
        leanest = min((p.peak_rss_bytes for p in peers if p.peak_rss_bytes), default=None)
        mine = m.peak_rss_bytes
        return replace(
            row,
            best_peer=best.contender.name,
            ratio_to_best_peer=self._ratio(m, best),
            ratio_to_best_peer_lowest=min(ratios),
            ratio_to_best_peer_highest=max(ratios),
            rss_ratio_to_leanest_peer=mine / leanest if mine and leanest else None,
        )

    def _with_parity(self, row: BenchRow, m: Measured) -> BenchRow:
        """Hold the losses against our own engine's; one that trains other dtypes is not judged."""
        ours = [o for o in self.all if o.contender.engine is EngineName.RAYZERO and o.losses]
        if not ours or m.contender.engine is None:
            return row
        reference = min(ours, key=lambda o: o.contender.stage)
        difference = loss_difference(m.losses, reference.losses)
        row = replace(row, loss_difference=difference)
        bound = LOSS_BOUNDS[m.setting.precision]
        if difference <= bound or not m.keeps_dtypes:
            return row
        return replace(
            row,
            status=Status.PARITY_FAILED.value,
            reason=f"losses differ from rayzero's at stage {reference.contender.stage} by "
            f"{difference:.2e}; allowed {bound:.0e}",
        )

    def _peers(self, stage: int) -> list[Measured]:
        return [
            m
            for m in self.all
            if m.contender.is_peer and m.contender.stage == stage and m.keeps_dtypes
        ]

    @staticmethod
    def _ratio(m: Measured, other: Measured | None) -> float | None:
        if other is None or other.step_s is None or m.step_s is None:
            return None
        return m.step_s / other.step_s


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference; infinity where a loss is not finite."""
    pairs = list(zip(losses, reference, strict=True))
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.inf
    return max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)


def rounds_of(measured: Sequence[Measured]) -> list[RoundRow]:
    """Return a row for each engine, setting and round."""
    return [
        RoundRow(
            round=number,
            engine=m.contender.name,
            stage=m.contender.stage,
            precision=m.setting.precision,
            regime=m.setting.regime.name,
            accumulation=m.setting.accumulation,
            step_s_median=record.row.step_s_median,
            peak_rss_bytes=record.row.peak_host_bytes,
            status=record.row.status,
            reason=record.row.reason,
        )
        for m in measured
        for number, record in enumerate(m.records, start=1)
    ]


def verdicts(rows: Sequence[BenchRow]) -> list[BoundRow]:
    """Hold our rows against BOUNDS, as far as both sides were measured."""
    found = []
    for row in rows:
        for bound in BOUNDS:
            ratio = _ratio_against(row, bound.against)
            ours = row.engine == EngineName.RAYZERO.value and row.stage in bound.stages
            if ours and row.transport in {c.value for c in bound.carriers} and ratio:
                found.append(_verdict(row, bound, ratio))
    return found


def _ratio_against(row: BenchRow, against: str) -> float | None:
    return {
        "best peer": row.ratio_to_best_peer,
        "ddp": row.ratio_to_ddp,
        "compute only": row.ratio_to_compute,
        "peak RSS of the leanest peer": row.rss_ratio_to_leanest_peer,
    }[against]


def _verdict(row: BenchRow, bound: Bound, ratio: float) -> BoundRow:
    limit = float(getattr(bound, row.regime))
    noise = RSS_NOISE if bound.against.startswith("peak RSS") else NOISE
    has_master = PRECISIONS[row.precision].has_master
    verdict = (
        "reached" if ratio <= limit else "within noise" if ratio <= limit * noise else "missed"
    )
    if bound.against == "ddp" and has_master:
        verdict = "not judged: DDP keeps no fp32 master"
    return BoundRow(
        precision=row.precision,
        regime=row.regime,
        accumulation=row.accumulation,
        stage=row.stage,
        against=row.best_peer if bound.against == "best peer" else bound.against,
        ratio=ratio,
        bound=limit,
        verdict=verdict,
    )
