"""The verb tables: the ZeRO papers' tables as printed, by formula, by dry run and measured."""

from collections.abc import Sequence
from pathlib import Path

from rayzero.config.build import to_plain
from rayzero.config.cell import CellConfig
from rayzero.report.paper_figure import SchemeBar, write_figure_1
from rayzero.report.paper_table import PaperTable, write_csv, write_page
from rayzero.report.style import Caption
from rayzero.report.terminal import default_console
from rayzero.studies.evidence import Evidence
from rayzero.studies.memory_tables import STAGES, conventions, figure_1, table_1, table_2
from rayzero.studies.other_tables import offload_strategies, zero_r
from rayzero.studies.volume_tables import hybrid, stage_volumes, tensor_parallel, zeropp
from rayzero.theory.paper import CONVENTIONS, Convention
from rayzero.tracking.mlflow_tracker import open_tracker
from rayzero.tracking.tracker import End

HEAD = (
    "Each figure as the paper prints it, by formula at the printed number of parameters "
    "(`formula`) and at the module's own (`formula_exact`), by playing this engine at that size "
    "(`dryrun`; minus formula_exact it is `dryrun_padding`), and measured on ranks of this machine "
    "with a smaller model of the same ratios. `difference` is printed minus formula; `reason` "
    "explains it.",
    "GB is 1e9 bytes throughout, as in the papers.",
    "![Figure 1](zero_fig1_memory.png)",
)


def main(config: CellConfig) -> int:
    """Build all tables, print what they say, write files and log them to MLflow."""
    console = default_console()
    folder = Path(config.run.output) / "tables"
    with open_tracker(config.tracking, Path(config.run.output)) as tracker:
        plain = to_plain(config)
        assert isinstance(plain, dict)
        tracker.open_sweep(config.experiment.name, config.experiment.question, plain, {})
        evidence = Evidence()
        build_tables(evidence, config.tables.bytes_per_param)
        evidence.gather(config, lambda line: console.print(line, markup=False, highlight=False))
        tables = build_tables(evidence, config.tables.bytes_per_param)
        write_tables(tables, folder, bytes_per_param=config.tables.bytes_per_param)
        tracker.close_sweep(End.FINISHED, folder)
        for problem in tracker.problems:
            console.print(problem, markup=False, highlight=False)
    for table in tables:
        console.print(summary(table), markup=False, highlight=False)
    console.print(str(folder / "tables.md"), markup=False, highlight=False, soft_wrap=True)
    return 0


def build_tables(evidence: Evidence, bytes_per_param: int) -> list[PaperTable]:
    """Build all tables from the evidence there is; what is missing is noted as asked."""
    return [
        figure_1(evidence, bytes_per_param),
        table_1(evidence, bytes_per_param),
        table_2(bytes_per_param),
        conventions(evidence),
        stage_volumes(evidence),
        zero_r(evidence),
        offload_strategies(evidence),
        zeropp(evidence),
        hybrid(evidence),
        tensor_parallel(evidence),
    ]


def write_tables(tables: Sequence[PaperTable], folder: Path, *, bytes_per_param: int) -> None:
    """Write a CSV for each table, the page, and figure 1."""
    for table in tables:
        write_csv(table, folder)
    write_page(tables, folder, head=HEAD)
    caption = Caption(
        title="ZeRO figure 1, drawn again",
        chart="Model states per device, 7.5B parameters, 64 ranks",
        subtitle=f"by formula at {bytes_per_param} bytes per parameter; engine: dry run of stage 0 "
        "to 3 at 7.47e9 parameters",
    )
    bars = scheme_bars(tables[0], CONVENTIONS[bytes_per_param])
    write_figure_1(bars, folder / "zero_fig1_memory.png", caption)


def scheme_bars(table: PaperTable, convention: Convention) -> list[SchemeBar]:
    """Split each scheme's bytes by kind."""
    bars = []
    for row in table.rows:
        stage, shards = STAGES[row.facts["scheme"]], int(row.facts["dp_degree"])
        sizes = {
            "parameters": convention.params / (shards if stage >= 3 else 1),
            "gradients": convention.grads / (shards if stage >= 2 else 1),
            "optimizer states": convention.optimizer / (shards if stage >= 1 else 1),
        }
        params = float(row.facts["psi_B"])
        bars.append(
            SchemeBar(
                scheme=row.facts["scheme"],
                parts_GB={name: size * params for name, size in sizes.items()},
                printed=row.facts["per_device_GB_printed"],
                dryrun_GB=None if row.dryrun is None else float(row.dryrun),
            )
        )
    return bars


def summary(table: PaperTable) -> str:
    """Say in a line how a table came out."""
    printed = [row for row in table.rows if row.difference is not None]
    equal = sum(row.difference == 0 for row in printed)
    dry = sum(row.dryrun is not None for row in table.rows)
    measured = sum(row.measured is not None for row in table.rows)
    return (
        f"{table.name}: {len(table.rows)} rows; {equal} of {len(printed)} printed figures equal "
        f"the formula unrounded; {dry} dry runs, {measured} measured"
    )
