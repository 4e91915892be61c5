"""Runs the trials once, and hands their reports to the claims that read them."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from rayzero.config.cell import CellConfig
from rayzero.errors import RayzeroError
from rayzero.records import DryRunReport, Observation, RankReport, Status
from rayzero.run import CellRunner, rehearse
from rayzero.studies.asked import Asked
from rayzero.studies.claims.trial import Trial
from rayzero.studies.claims.verdict import Verdict

NOT_RUN = "not run: claims.measure=false"
AT_13B = Asked(model="13B", world=8, stage=3)
Say = Callable[[str], None]
Result = TypeVar("Result")


class NoResultError(RayzeroError):
    """An experiment has no result; verdict: undecided where it was not run, else failed."""

    def __init__(self, reason: str, verdict: Verdict) -> None:
        super().__init__(reason)
        self.verdict = verdict


@dataclass(slots=True)
class Lab:
    """Results of trials and dry runs; reading one that is missing raises NoResultError."""

    measured: dict[Trial, Sequence[RankReport]] = field(default_factory=dict)
    observed: dict[Trial, Sequence[Observation]] = field(default_factory=dict)
    dry: dict[Asked, DryRunReport] = field(default_factory=dict)
    failures: dict[Trial | Asked, str] = field(default_factory=dict)
    read: set[Trial | Asked] = field(default_factory=set)
    """What claims have asked for."""

    def reports(self, trial: Trial) -> Sequence[RankReport]:
        """Return the reports of a measured trial, by rank."""
        return self._found(trial, self.measured.get(trial))

    def observations(self, trial: Trial) -> Sequence[Observation]:
        """Return what the ranks of a watched trial saw."""
        return self._found(trial, self.observed.get(trial))

    def played(self, asked: Asked) -> DryRunReport:
        """Return a dry run."""
        return self._found(asked, self.dry.get(asked))

    def run(self, trials: Sequence[Trial], base: CellConfig, say: Say) -> None:
        """Run all trials; one that fails is noted with its reason, the others go on."""
        with _runner() as runner:
            self._run_all(runner, trials, base, say)

    def run_what_is_read(self, read: Callable[[], object], base: CellConfig, say: Say) -> None:
        """Run what `read` asks this lab for, until it lacks nothing.

        A reading that is missing ends what a claim reads: each round shows what it wants next.
        """
        with _runner() as runner:
            while missing := self._missing_after(read):
                if AT_13B in missing:
                    self.play(base, say)
                trials = [key for key in missing if isinstance(key, Trial)]
                self._run_all(runner, sorted(trials, key=_in_order), base, say)

    def play(self, base: CellConfig, say: Say) -> None:
        """Play the dry run that a claim needs, in a process of its own."""
        started_s = time.monotonic()
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            try:
                self.dry[AT_13B] = pool.submit(rehearse, AT_13B.config(base)).result()
            except (RayzeroError, BrokenProcessPool) as error:
                self.failures[AT_13B] = str(error)
        say(f"dry run of 13B on 8 ranks, stage 3: {time.monotonic() - started_s:.1f} s")

    def _missing_after(self, read: Callable[[], object]) -> list[Trial | Asked]:
        read()
        known = {*self.measured, *self.observed, *self.dry, *self.failures}
        return [key for key in self.read if key not in known]

    def _run_all(
        self, runner: CellRunner, trials: Sequence[Trial], base: CellConfig, say: Say
    ) -> None:
        for number, trial in enumerate(trials, 1):
            started_s = time.monotonic()
            outcome = self._run_one(runner, trial, base)
            seconds = time.monotonic() - started_s
            say(f"{number}/{len(trials)} {trial}: {outcome}, {seconds:.1f} s")

    def _run_one(self, runner: CellRunner, trial: Trial, base: CellConfig) -> str:
        """Run a trial and keep what it gave; return how it went."""
        try:
            config = trial.config(base)
            if trial.alteration is not None:
                self.observed[trial] = runner.observe(config, trial.alteration)
                return "ok"
            record = runner.run(config)
        except RayzeroError as error:
            self.failures[trial] = str(error)
            return f"failed: {error}"
        if record.row.status != Status.OK.value:
            self.failures[trial] = f"{record.row.status}: {record.row.reason}"
            return self.failures[trial]
        self.measured[trial] = record.reports
        return "ok"

    def _found(self, key: Trial | Asked, result: Result | None) -> Result:
        self.read.add(key)
        if result is not None:
            return result
        reason = self.failures.get(key)
        if reason is None:
            raise NoResultError(NOT_RUN, Verdict.UNDECIDED)
        raise NoResultError(f"{key}: {reason}", Verdict.FAILED)


def _in_order(trial: Trial) -> tuple[int, str]:
    """Those of as many ranks together."""
    return trial.world, str(trial)


@contextmanager
def _runner() -> Iterator[CellRunner]:
    runner = CellRunner()
    try:
        yield runner
    finally:
        runner.close()
