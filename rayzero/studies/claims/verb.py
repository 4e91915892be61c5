"""The verb claims: run the experiments, decide every claim, print, write and log what was found."""

from collections.abc import Sequence
from pathlib import Path

from rayzero.config.build import to_plain
from rayzero.config.cell import CellConfig
from rayzero.errors import ConfigError
from rayzero.report.claims_page import (
    ClaimRow,
    counted,
    write_claims_csv,
    write_claims_page,
    write_claims_picture,
)
from rayzero.report.style import Caption
from rayzero.report.terminal import default_console
from rayzero.studies.claims.all_claims import ALL
from rayzero.studies.claims.claim import Claim, decided
from rayzero.studies.claims.lab import Lab, Say
from rayzero.studies.claims.trial import plan
from rayzero.studies.claims.verdict import Verdict
from rayzero.tracking.mlflow_tracker import open_tracker
from rayzero.tracking.tracker import End

HEAD = (
    "Each claim circulates in talks, posts and interviews; the words are ours. A figure says in "
    "brackets between which bounds the claim would be right; the verdict follows from figures and "
    "bounds by the rules of `rayzero/studies/claims/verdict.py`. Experiments: E1 transfers of a "
    "step, E2 bytes held, E3 calculation, E4 weights and gradients, E5 accumulation, E6 tensor "
    "parallelism, E7 break-even, E8 link rates, E9 persistence, E10 buckets and units, E11 a link "
    "with latency, E12 offload, E13 published runs.",
    "`unsupported`: a number that some cases contradict, or that no source gives. `convention`: "
    "right only under the convention that stands before its figures.",
)


def main(config: CellConfig) -> int:
    """Return 0 where every experiment gave its figures, else 1."""
    console = default_console()
    claims = chosen(config.claims.only)
    folder = Path(config.run.output) / "claims" / name_of_choice(config.claims.only)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with open_tracker(config.tracking, Path(config.run.output)) as tracker:
        plain = to_plain(config)
        assert isinstance(plain, dict)
        about = config.experiment
        tracker.open_sweep(about.name, about.question, plain, {"kind": "claims"})
        lab = Lab()
        if config.claims.measure:
            measure(lab, claims, config, say)
        rows = rows_of(claims, lab)
        write_all(rows, folder)
        failed = [row for row in rows if row.verdict == Verdict.FAILED.value]
        tracker.close_sweep(End.FAILED if failed else End.FINISHED, folder)
        problems = tracker.problems
    for line in (*summary(rows), *problems, str(folder / "claims.md")):
        say(line)
    return 1 if failed else 0


def chosen(only: Sequence[int]) -> Sequence[Claim]:
    """Return the claims of these numbers in order, all where there are none."""
    known = [claim.number for claim in ALL]
    unknown = sorted({*only} - {*known})
    if unknown:
        raise ConfigError(
            f"claims.only names {', '.join(map(str, unknown))}, which is no claim; allowed: "
            f"{min(known)} to {max(known)}, such as claims.only=[4,6]; [] decides all"
        )
    return [claim for claim in ALL if claim.number in only] if only else ALL


def name_of_choice(only: Sequence[int]) -> str:
    """Name the folder of some claims, so that they do not replace all; all need none."""
    return "_".join(["only", *map(str, sorted({*only}))]) if only else ""


def measure(lab: Lab, claims: Sequence[Claim], config: CellConfig, say: Say) -> None:
    """Run the experiments of the claims; those of all are known beforehand, so ranks start once."""
    if len(claims) < len(ALL):
        lab.run_what_is_read(lambda: decided(claims, lab), config, say)
        return
    lab.play(config, say)
    lab.run(plan(), config, say)


def rows_of(claims: Sequence[Claim], lab: Lab) -> list[ClaimRow]:
    """Decide the claims."""
    return [
        ClaimRow(
            number=found.claim.number,
            claim=found.claim.text,
            verdict=found.verdict,
            figure=found.figure,
            expected=found.expected,
            experiment=found.experiment,
            note=found.claim.note,
        )
        for found in decided(claims, lab)
    ]


def write_all(rows: Sequence[ClaimRow], folder: Path) -> None:
    """Write claims.csv, claims.md and claims.png."""
    write_claims_csv(rows, folder)
    write_claims_page(rows, folder, head=HEAD)
    differing = sum(not row.is_as_expected for row in rows)
    caption = Caption(
        title="Which common claims on ZeRO hold?",
        chart=f"{len(rows)} claims by number and verdict",
        subtitle=f"computed from figures of this run; {differing} not as expected",
    )
    write_claims_picture(rows, folder / "claims.png", caption)


def summary(rows: Sequence[ClaimRow]) -> list[str]:
    """Say how often each verdict came, and which ones were not expected."""
    counts = ", ".join(f"{number} {word}" for word, number in counted(rows).items())
    differing = [row for row in rows if not row.is_as_expected]
    lines = [f"{len(rows)} claims: {counts}", f"{len(differing)} not as expected"]
    for row in differing:
        why = row.figure if row.verdict == Verdict.FAILED.value else row.note
        lines.append(f"  {row.number}: {row.verdict}, expected {row.expected}. {why}")
    return lines
