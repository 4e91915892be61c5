"""Answers to what tables ask: the engine played at any size, and cells measured on this machine."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from rayzero.config.cell import CellConfig
from rayzero.config.run import RunConfig
from rayzero.errors import RayzeroError
from rayzero.records import (
    Carrier,
    DryRunReport,
    Holdings,
    Phase,
    RankReport,
    Status,
    Transfer,
    Where,
)
from rayzero.run import CellRunner, rehearse
from rayzero.studies.asked import Asked
from rayzero.theory.memory import STATES
from rayzero.theory.question import question_of

NOT_MEASURED = "not measured on this machine"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What a table reads off a rank: bytes of states, and volumes as the papers count them."""

    num_params: int
    states_bytes: int
    device_states_bytes: int
    data_elements: int
    """Elements through the data axes: a gather or reduce-scatter once, an all-reduce twice."""
    replicate_elements: int
    data_bytes: int
    layer_elements: int
    """The part of data_elements that belongs to the first layer (stage 3)."""
    tp_transfers: int
    """Transfers over tp that carry the first layer's activations."""


@dataclass(slots=True)
class Evidence:
    """First notes what is asked, then answers; None where it was not run, with the reason."""

    dry: dict[Asked, DryRunReport | None] = field(default_factory=dict)
    real: dict[Asked, RankReport | None] = field(default_factory=dict)
    problem: str = NOT_MEASURED

    def played(self, asked: Asked) -> DryRunReport | None:
        """Return the dry run of this cell."""
        return self.dry.setdefault(asked)

    def measured(self, asked: Asked) -> RankReport | None:
        """Return rank 0's report of this cell, run here."""
        return self.real.setdefault(asked)

    def gather(self, base: CellConfig, say: Say) -> None:
        """Run all that was asked, as the group tables allows."""
        if base.tables.dryrun:
            self._play(base, say)
        if base.tables.measure:
            self._measure(base, say)

    def _play(self, base: CellConfig, say: Say) -> None:
        asked = sorted(self.dry, key=lambda a: (a.model, a.world))
        say(f"{len(asked)} dry runs")
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
            reports = pool.map(rehearse, [one.config(base) for one in asked])
            for one, report in zip(asked, reports, strict=True):
                self.dry[one] = report
                say(f"{one.model} stage {one.stage} on {one.world} ranks: {report.wall_s:.1f} s")

    def _measure(self, base: CellConfig, say: Say) -> None:
        runner = CellRunner()
        try:
            for one in sorted(self.real, key=lambda a: a.world):
                self.real[one] = self._measured_cell(runner, one, base, say)
        except RayzeroError as error:
            self.problem = f"{NOT_MEASURED}: {error}"
            say(self.problem)
        finally:
            runner.close()

    def _measured_cell(
        self, runner: CellRunner, asked: Asked, base: CellConfig, say: Say
    ) -> RankReport | None:
        config = replace(
            asked.config(base),
            cluster=replace(base.cluster, ranks_per_node=asked.world),
            run=RunConfig(num_steps=1, warmup_steps=1, probe=False, output=base.run.output),
        )
        record = runner.run(config)
        say(f"measured {record.row.cell}: {record.row.status} {record.row.reason}")
        if record.row.status != Status.OK.value:
            self.problem = f"{NOT_MEASURED}: {record.row.reason}"
            return None
        return record.reports[0]


def sums_of(num_params: int, holdings: Holdings, transfers: tuple[Transfer, ...]) -> Sums:
    """Add up what a rank holds and sends."""
    data = [t for t in transfers if t.axis in ("shard", "data") and t.phase is not Phase.CONTROL]
    return Sums(
        num_params=num_params,
        states_bytes=holdings.bytes_of(*STATES),
        device_states_bytes=holdings.bytes_of(*STATES, where=Where.DEVICE),
        data_elements=sum(_elements(t) for t in data),
        replicate_elements=sum(_elements(t) for t in transfers if t.axis == "replicate"),
        data_bytes=sum(t.sent_bytes for t in data),
        layer_elements=sum(_elements(t) for t in data if t.unit.startswith("blocks.0#")),
        tp_transfers=sum(t.axis == "tp" and t.unit.startswith("blocks.0.") for t in transfers),
    )


def padding_elements(asked: Asked) -> int:
    """Return the elements that alignment adds to all flats together, by the layout alone."""
    question = question_of(
        asked.config(CellConfig()), world=asked.world, rank=0, carrier=Carrier.NATIVE
    )
    return sum(flat.padded - flat.numel for flat in question.layouts)


def _elements(transfer: Transfer) -> int:
    return transfer.elements * (2 if transfer.op == "all_reduce" else 1)
