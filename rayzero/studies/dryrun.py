"""The verb dryrun: what one rank of any world holds and sends, beside the formula."""

from pathlib import Path

from rayzero.config.cell import CellConfig
from rayzero.records import DryRunReport
from rayzero.report.dry_run import compare, print_dry_run, write_bytes, write_timeline
from rayzero.report.memory_picture import write_memory_picture
from rayzero.report.style import Caption
from rayzero.report.terminal import default_console
from rayzero.rows import cell_name
from rayzero.run import rehearse


def main(config: CellConfig) -> int:
    """Play the rank, print and write; return 0 if engine and formula agree to the byte."""
    report = rehearse(config)
    amounts = compare(report)
    console = default_console()
    console.print(f"{title_of(config, report)}, {report.num_params:,} parameters")
    print_dry_run(report, amounts, console)
    base = Path(config.run.output) / "dryrun" / file_name(config, report)
    paths = [write_bytes(amounts, base.with_name(f"{base.name}.csv"))]
    if report.timeline:
        name = f"{base.name}_memory"
        paths.append(write_timeline(report, base.with_name(f"{name}.csv")))
        caption = Caption(
            title=f"{config.model.name}: memory over one step",
            chart="Live bytes by kind at the highest moment of each visit of a unit",
            subtitle=title_of(config, report),
        )
        paths.append(write_memory_picture(report.timeline, base.with_name(f"{name}.png"), caption))
    for path in paths:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{report.wall_s:.1f} s")
    return 0 if all(amount.is_equal for amount in amounts) else 1


def title_of(config: CellConfig, report: DryRunReport) -> str:
    """Say which rank of which world this is."""
    parallel = config.parallel
    return (
        f"{config.model.name}, stage {config.zero.stage}, rank {report.rank} of {report.world} "
        f"(tp {parallel.tp}, replicate {parallel.replicate}), {config.precision.name}"
    )


def file_name(config: CellConfig, report: DryRunReport) -> str:
    """Name the files after the cell and the rank."""
    cell = cell_name(config, dp=config.grid(report.world).dp)
    model = "" if config.model.name in cell else f"{config.model.name}_"
    return f"{model}{cell}_rank{report.rank}"
