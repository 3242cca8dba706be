"""A record as tables and as an HTML page, and all records as Markdown for the documentation."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.score import WORKLOAD
from qwen_serve.bench.load.protocol import DISTINCT, OFFICIAL
from qwen_serve.bench.record.document import Clocks, Record, Row, Spread
from qwen_serve.bench.terminal import Cell, Table, show

LATENCY = "latency"
THROUGHPUT = "throughput-"
TEMPLATES = Path(__file__).parents[1] / "report"
SCHEMA = "schema.json"
NAME = r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*--[A-Za-z0-9._-]+\.json$"
"""Matches a file's name in the repository: sender, GPU and model."""


def title(record: Record) -> str:
    """The page's title: model and GPU, or processor."""
    return f"{record.model.file} on {record.machine.card or record.machine.processor}"


def html(record: Record) -> str:
    """A self-contained HTML page."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    missing = [name for name, state in record.parts.items() if state == "missing"]
    template = environment.get_template("record.html.j2")
    made = template.render(
        title=title(record), record=record, missing=missing, tables=tables(record), show=show
    )
    return made + "\n"


def community(records: dict[str, Record]) -> str:
    """All records as Markdown. ``records``: by file name."""
    if not records:
        return "Nothing has come yet.\n"
    parts = []
    for name, record in records.items():
        sender = name.partition("--")[0]
        parts.append(f"## {title(record)}\n\nSent by [{sender}](https://github.com/{sender}), {record.made}.")
        parts += [table.markdown().strip() for table in tables(record)]
    return "\n\n".join(parts) + "\n"


def records_in(folder: Path) -> dict[str, Record]:
    """The records of a folder, by file name. Raises BenchError for a file that is invalid, made with --quick
    or misnamed."""
    found: dict[str, Record] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name == SCHEMA:
            continue
        if not re.match(NAME, path.name):
            raise BenchError(f"{path}: want SENDER--CARD-MODEL.json")
        found[path.name] = Record.read(path)
        if found[path.name].quick:
            raise BenchError(f"{path}: a quick run says nothing; want one without --quick")
    return found


def tables(record: Record) -> list[Table]:
    """Tables of latency, throughput, gates, start and conditions, if they have rows."""
    made = [_latency(record), _throughput(record), _gates(record), _start(record), _machine(record)]
    return [table for table in made if table.rows]


def _latency(record: Record) -> Table:
    lines: list[dict[str, Cell]] = []
    rows = [row for row in record.rows if row.part in (OFFICIAL, DISTINCT) and row.metric == LATENCY]
    for cell in dict.fromkeys(row.cell for row in rows):
        line: dict[str, Cell] = {"prompt": cell}
        for row in (row for row in rows if row.cell == cell):
            line[f"{row.part}, ms"] = row.p50
            line[f"{row.part}, p10 to p90"] = f"{show(row.p10)} to {show(row.p90)}"
            line[f"{row.part}, requests"] = row.values
        lines.append(line)
    notes = [
        "Medians of one request at a time. official: the same prompt again; distinct: another each time."
    ]
    return Table.of(lines, title="Latency", notes=notes)


def _throughput(record: Record) -> Table:
    lines: list[dict[str, Cell]] = []
    rows = [row for row in record.rows if row.part.startswith(THROUGHPUT)]
    for part in dict.fromkeys(row.part for row in rows):
        found = {row.metric: row for row in rows if row.part == part}
        line: dict[str, Cell] = {"at once": part.removeprefix(THROUGHPUT)}
        if rate := found.get("output_rate"):
            line |= {"output tok/s": rate.p50, "p10 to p90": f"{show(rate.p10)} to {show(rate.p90)}"}
            line["rounds"] = rate.rounds
        line |= {f"{name.upper()}, ms": _median(found.get(name)) for name in ("ttft", "itl")}
        if "failed" in found:
            line["failed requests, p90"] = found["failed"].p90
        lines.append(line)
    return Table.of(lines, title="Throughput")


def _gates(record: Record) -> Table:
    lines: list[dict[str, Cell]] = []
    rows = [row for row in record.rows if row.workload == WORKLOAD]
    for part in dict.fromkeys(row.part for row in rows):
        whole = {row.metric: row for row in rows if row.part == part}
        line: dict[str, Cell] = {"gate": part, "score %": _median(whole.get("score"))}
        if {"score_low", "score_high"} <= whole.keys():
            low, high = whole["score_low"].p50, whole["score_high"].p50
            line["95% interval"] = f"{show(low)} to {show(high)}"
        line |= {f"{name} %": _median(whole.get(name)) for name in ("threshold", "baseline")}
        items, of = _median(whole.get("items")), _median(whole.get("items_in_all"))
        line["items"] = f"{items:.0f} of {of:.0f}" if items is not None and of is not None else None
        line["cut answers"] = _median(whole.get("cut_answers"))
        lines.append(line)
    return Table.of(lines, title="Gates, a sample of each")


def _start(record: Record) -> Table:
    rows = [row for row in record.rows if row.metric == "start_time"]
    lines: list[dict[str, Cell]] = [
        {"stage": row.cell, "s": f"{row.p50:.2f}", "starts": row.values} for row in rows
    ]
    return Table.of(lines, title="From the command to the first 200")


def _machine(record: Record) -> Table:
    machine = record.machine
    told: dict[str, str | None] = {
        "model": f"{record.model.file}, {record.model.bytes:,} bytes, SHA-256 {record.model.sha256}",
        "card": machine.card,
        "driver": machine.driver,
        "processor": f"{machine.processor}, {machine.cores} cores, {machine.memory}",
        "system": machine.system,
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
        "commit": record.commit,
        "made": str(record.made),
    }
    told |= _clocks(record.clocks) if record.clocks is not None else {}
    return Table(
        ["what", "which"], [[name, text] for name, text in told.items() if text], title="Measured with"
    )


def _clocks(clocks: Clocks) -> dict[str, str | None]:
    def said(spread: Spread, unit: str, most: float | None = None) -> str:
        limit = f", of {most:.0f}" if most is not None else ""
        return f"{spread.p50:.0f} {unit} ({spread.p10:.0f} to {spread.p90:.0f}{limit})"

    return {
        "SM clock": said(clocks.sm, "MHz", clocks.sm_most),
        "memory clock": said(clocks.memory, "MHz", clocks.memory_most),
        "power": said(clocks.power, "W", clocks.power_limit),
        "temperature": said(clocks.temperature, "°C"),
    }


def _median(row: Row | None) -> float | None:
    return row.p50 if row is not None else None
