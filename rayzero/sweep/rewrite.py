"""The verb report: write a sweep's matrix, tables and pictures again from its cells' records."""

from rayzero.config.cell import CellConfig
from rayzero.report.sweep_report import write_report
from rayzero.report.terminal import default_console, print_matrix
from rayzero.sweep.folder import SweepFolder, folder_path
from rayzero.sweep.parity import with_parity


def main(config: CellConfig) -> int:
    """Rewrite the report of the latest sweep of config.experiment on config.cluster."""
    folder = SweepFolder(folder_path(config))
    note, records = folder.latest()
    judged = with_parity(records)
    write_report(judged, folder.path, question=note.question)
    console = default_console()
    print_matrix(judged, console)
    console.print(f"results: {folder.path}", markup=False, highlight=False, soft_wrap=True)
    return 0
