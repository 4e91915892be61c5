"""report.html: the matrix, what it says in words, its pictures, and why cells failed; one file."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from rayzero.records import CellRecord, Status
from rayzero.report.figures import MAPS
from rayzero.report.files import replace_file
from rayzero.report.reconcile import Match, memory_match, traffic_match
from rayzero.report.summary import difference_text, fastest, leanest, sentences
from rayzero.report.units import Unit, common_unit

PAGE_FILE = "report.html"
DASH = "&ndash;"

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { --ink: #1b1f24; --quiet: #57606a; --line: #d8dee4; --soft: #f6f8fa; }
body { margin: 0 auto; max-width: 1120px; padding: 2rem 1.5rem 4rem; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .8rem; }
.about, figcaption, .note { color: var(--quiet); font-size: .88rem; }
ul.findings { padding-left: 1.2rem; }
ul.findings li { margin: .35rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; width: 100%;
  font-variant-numeric: tabular-nums; }
th { border-bottom: 2px solid var(--ink); text-align: right; vertical-align: bottom;
  padding: .35rem .6rem; font-weight: 600; }
td { border-bottom: 1px solid var(--line); text-align: right; padding: .35rem .6rem;
  white-space: nowrap; }
th.left, td.left { text-align: left; }
tr:hover td { background: var(--soft); }
td.best { font-weight: 700; background: #e6f4ea; }
.status { border-radius: .8rem; padding: .1rem .55rem; font-size: .8rem; background: #fbe3e0;
  color: #8a1c10; }
.status.ok { background: #e6f4ea; color: #12602c; }
.status.impossible { background: #fdf1d3; color: #6e4a00; }
.off { color: #8a1c10; font-weight: 600; }
.pictures { display: grid; grid-template-columns: 1fr 1fr; gap: 1.4rem; }
figure { margin: 0; grid-column: span 2; }
figure.map { grid-column: span 1; }
@media (max-width: 760px) { figure.map { grid-column: span 2; } }
figure img { max-width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; }
details { margin: -.7rem 0 1rem; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .8rem;
  overflow-x: auto; font-size: .8rem; max-height: 24rem; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="about">$about</p>
<ul class="findings">
$findings
</ul>
<h2>The matrix</h2>
<div class="scroll"><table>
$table
</table></div>
<p class="note">tokens/s counts all ranks. Peak, held and sent are per rank, of the rank with the
most. Held and sent stand beside the formulas of the ZeRO paper; "exact" means equal to the byte,
on every rank and in every kind. An empty place was not measured.</p>
$failures
<h2>Pictures</h2>
<div class="pictures">
$figures
</div>
</body>
</html>
""")


def write_page(
    records: Sequence[CellRecord], pictures: Sequence[Path], path: Path, *, question: str
) -> Path:
    """Write the page with the pictures embedded."""
    page = _PAGE.substitute(
        title=escape(question),
        about=escape(_about(records)),
        findings="\n".join(f"<li>{escape(s)}</li>" for s in sentences(records)),
        table=_table(records),
        failures=_failures(records),
        figures="\n".join(_figure(picture) for picture in pictures),
    )
    return replace_file(path, page.encode())


def _about(records: Sequence[CellRecord]) -> str:
    def distinct(column: str) -> str:
        return ", ".join(dict.fromkeys(v for r in records if (v := getattr(r.row, column))))

    parts = [("model", distinct("model")), ("precision", distinct("precision"))]
    parts += [("devices", distinct("devices")), ("engine", distinct("engine"))]
    return "; ".join(f"{name} {value}" for name, value in parts if value)


def _table(records: Sequence[CellRecord]) -> str:
    held = [memory_match(record) for record in records]
    sent = [traffic_match(record) for record in records]
    units = [
        common_unit(record.row.peak_bytes for record in records),
        common_unit(match.measured_bytes if match else None for match in held),
        common_unit(match.measured_bytes if match else None for match in sent),
    ]
    best, lean = fastest(records), leanest(records)
    lines = [_header(units)]
    for record, memory, traffic in zip(records, held, sent, strict=True):
        row = record.row
        cells = [
            _cell(escape(row.cell), "left"),
            _cell(_status(row.status), "left"),
            _cell(_number(row.tokens_per_s, "{:,.0f}"), "best" if record is best else ""),
            _cell(_number(row.step_s_median, "{:.1f}", factor=1000.0)),
            _cell(_number(row.step_s_p95, "{:.1f}", factor=1000.0)),
            _cell(_bytes(row.peak_bytes, units[0]), "best" if record is lean else ""),
            *_compared(memory, units[1]),
            *_compared(traffic, units[2]),
            _cell(_parity(row.parity)),
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join(lines)


def _header(units: Sequence[Unit]) -> str:
    peak, held, sent = (unit.name for unit in units)
    left = "".join(f'<th class="left">{name}</th>' for name in ("cell", "status"))
    names = ["tokens/s", "step ms", "p95 ms", f"peak {peak}", f"held {held}", "against formula"]
    names += [f"sent per step {sent}", "against formula", "parity"]
    return f"<tr>{left}{''.join(f'<th>{name}</th>' for name in names)}</tr>"


def _cell(html: str, css: str = "") -> str:
    return f'<td class="{css}">{html}</td>' if css else f"<td>{html}</td>"


def _status(status: str) -> str:
    return f'<span class="status {escape(status)}">{escape(status.replace("_", " "))}</span>'


def _number(value: float | None, form: str, *, factor: float = 1.0) -> str:
    return DASH if value is None else form.format(value * factor)


def _bytes(value: int | None, unit: Unit) -> str:
    return DASH if value is None else unit.text(value)


def _compared(match: Match | None, unit: Unit) -> list[str]:
    if match is None:
        return [_cell(DASH), _cell(DASH)]
    off = f'<span class="off">{difference_text(match)}</span>'
    return [_cell(unit.text(match.measured_bytes)), _cell("exact" if match.is_exact else off)]


def _parity(parity: str) -> str:
    if parity in ("", "ok"):
        return parity or DASH
    return f'<span class="off">{escape(parity)}</span>'


def _failures(records: Sequence[CellRecord]) -> str:
    failed = [record for record in records if record.row.status != Status.OK.value]
    if not failed:
        return ""
    return "\n".join(["<h2>Cells without a result</h2>", *map(_failure, failed)])


def _failure(record: CellRecord) -> str:
    head = f"<p><b>{escape(record.row.cell)}</b> {_status(record.row.status)} "
    text = f"{head}{escape(record.row.reason)}</p>"
    if record.log:
        text += f"<details><summary>log</summary><pre>{escape(record.log)}</pre></details>"
    return text


def _figure(picture: Path) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    name = escape(picture.stem.replace("_", " "))
    source = f"data:image/png;base64,{data}"
    css = ' class="map"' if picture.stem.startswith(MAPS) else ""
    image = f'<img alt="{name}" src="{source}">'
    return f"<figure{css}>{image}<figcaption>{name}</figcaption></figure>"
