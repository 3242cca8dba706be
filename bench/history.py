"""The history of experiments: append-only records, the best figure over time, and the way to a result.

    python bench/history.py add mtp-depth-4 --parent plain-q4 --changed "MTP drafts, depth 4" \\
        --fixed model=synthetic-4B-Q4_K_M.gguf --fixed workload="official latency protocol, 10 runs" \\
        --from bench/results/2026-11-21-h200/official-Q4_K_M.json \\
        --figure "official mean=/figures/[peer=ours][what=mean, official]/value ms lower"
    python bench/history.py show [NAME]
    python bench/history.py frontier --figure "official mean"
    python bench/history.py lineage mtp-depth-4
    python bench/history.py check

A record is one JSON file under bench/results/history/ (schema.json there says of what form) and is never
written again. A figure is NAME=VALUE UNIT lower|higher; its value a number, or what a path finds in the
--from file (or in FILE#PATH): a JSON pointer in which * is every element and [key=value] picks from a list;
the mean of what is found, times what stands after the last *. `check` reads it there again.
"""

import argparse
import os
import re
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import ValidationError

from bench.environment import card, versions
from bench.errors import BenchError
from bench.figures import read_document
from bench.history_record import Experiment, Figure, Source, schema
from bench.history_report import (
    details,
    draw_frontier,
    draw_lineage,
    frontier_table,
    lineage_points,
    lineage_table,
    overview,
    points,
)
from bench.history_store import FOLDER, append, check, lineage, load, parent_digest
from bench.options import run

FIGURE = re.compile(r"(?P<name>[^=]+)=(?P<value>\S.*?)\s+(?P<unit>\S+)\s+(?P<better>lower|higher)")
SCALED = re.compile(r"(?P<path>/.*?)(?:\*(?P<scale>[0-9.]+(?:e-?[0-9]+)?))?")


def history(args: argparse.Namespace) -> int:
    """The verb."""
    return int(args.action(args))


def add(args: argparse.Namespace) -> int:
    """Appends one record."""
    head = {} if args.source is None else _head(args.source)
    try:
        record = Experiment.model_validate(
            {
                "name": args.name,
                "date": args.date or head.get("started") or datetime.now(UTC).replace(microsecond=0),
                "changed": args.changed,
                "fixed": dict(args.fixed),
                "figures": dict(_figure(text, args.source, args.dir) for text in args.figure),
                "validity": "risky" if args.risky else "valid",
                "risks": args.risky,
                "parent": args.parent,
                "parent_digest": None if args.parent is None else parent_digest(args.dir, args.parent),
                "command": args.measured_by or head.get("command", []),
                "card": args.card or head.get("card") or card("http://localhost", None) or "",
                "versions": head.get("versions") or versions(),
                "notes": args.note,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        advice = {"command": "; give --command or --from", "card": "; give --card"}.get(field, "")
        raise BenchError(f"{args.name}: {field}: {first['msg'].lower()}{advice}") from error
    print(f"wrote {append(args.dir, record)}")
    return 0


def show(args: argparse.Namespace) -> int:
    """All records as a table, or one in full."""
    records = load(args.dir)
    print(overview(records) if args.name is None else details(lineage(records, args.name)[-1]))
    return 0


def frontier(args: argparse.Namespace) -> int:
    """The best so far over time."""
    records = [one for one in check(args.dir).values() if args.card in (None, one.card)]
    found = points(records, args.figure)
    print(frontier_table(found, args.figure))
    draw_frontier(found, args.figure, args.plot)
    print(f"wrote {args.plot}")
    return 0


def way(args: argparse.Namespace) -> int:
    """What each step of a record's lineage gave."""
    name, found = lineage_points(lineage(check(args.dir), args.name), args.figure)
    print(lineage_table(found, name))
    draw_lineage(found, name, args.plot)
    print(f"wrote {args.plot}")
    return 0


def check_all(args: argparse.Namespace) -> int:
    """Every record against the schema, its parent and its sources."""
    print(f"{args.dir}: {len(check(args.dir))} records, all in order")
    return 0


def print_schema(_: argparse.Namespace) -> int:
    """The JSON schema of a record."""
    print(schema(), end="")
    return 0


def _head(path: Path) -> dict[str, Any]:
    """What a result file says of its making: command, started, card (or processor), versions."""
    document = dict(read_document(path))
    if "command" not in document:
        raise BenchError(f"--from {path}: not a result file, it has no command")
    if document.get("card") is None and isinstance(host := document.get("host"), dict):
        document["card"] = f"none: {host.get('processor')}, {host.get('cores')} cores"
    return document


def _figure(text: str, default: Path | None, folder: Path) -> tuple[str, Figure]:
    """--figure's NAME=VALUE UNIT lower|higher. Raises BenchError that says what is wrong with it."""
    matched = FIGURE.fullmatch(text)
    if matched is None:
        raise BenchError(f"--figure {text!r}: want NAME=VALUE UNIT lower|higher, such as 'mean=225 ms lower'")
    name, value, unit, better = (matched[key].strip() for key in ("name", "value", "unit", "better"))
    source: Source | None = None
    try:
        number = float(value)
    except ValueError:
        source = _source(text, value, default, folder)
        number = source.read(folder)
    figure = {"value": number, "unit": unit, "better": better, "source": source}
    return name, Figure.model_validate(figure)


def _source(text: str, value: str, default: Path | None, folder: Path) -> Source:
    file, _, path = value.rpartition("#")
    scaled = SCALED.fullmatch(path)
    if scaled is None:
        raise BenchError(f"--figure {text!r}: want a number, or a path such as /summaries/0/latency/p50*1000")
    if not file and default is None:
        raise BenchError(f"--figure {text!r}: which file? give --from FILE, or FILE#PATH")
    cited = Path(os.path.relpath(file or str(default), folder)).as_posix()
    return Source(file=cited, path=scaled["path"], scale=float(scaled["scale"] or 1))


def pair(text: str) -> tuple[str, str]:
    """An argparse type: KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise argparse.ArgumentTypeError(f"{text}: want KEY=VALUE")
    return key, value


def moment(text: str) -> datetime:
    """An argparse type: an ISO date and time; UTC unless it says otherwise."""
    value = datetime.fromisoformat(text)
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python bench/history.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--dir", type=Path, default=FOLDER, help="the records (bench/results/history)")
    verbs = made.add_subparsers(required=True, metavar="add|show|frontier|lineage|check|schema")

    one = verbs.add_parser("add", parents=[where], help="append a record")
    one.set_defaults(action=add)
    one.add_argument("name", help="lower-case letters, digits, . _ -; never used before")
    one.add_argument("--changed", required=True, help="what is new against the parent")
    one.add_argument(
        "--fixed", type=pair, action="append", default=[], metavar="KEY=VALUE", help="what is not"
    )
    one.add_argument(
        "--figure", action="append", default=[], metavar="SPEC", help="NAME=VALUE UNIT lower|higher"
    )
    one.add_argument("--from", dest="source", type=Path, metavar="FILE", help="the result file of the run")
    one.add_argument("--parent", metavar="NAME", help="the record that this one is a change of")
    one.add_argument("--risky", action="append", default=[], metavar="WHY", help="why figures may not hold")
    one.add_argument("--note", action="append", default=[])
    one.add_argument(
        "--command", dest="measured_by", type=shlex.split, help="as typed (from the result file)"
    )
    one.add_argument("--card", help="the graphics card, with driver (from the result file, or nvidia-smi)")
    one.add_argument("--date", type=moment, help="when it was measured (from the result file, or now)")

    one = verbs.add_parser("show", parents=[where], help="all records, or one in full")
    one.set_defaults(action=show)
    one.add_argument("name", nargs="?")

    one = verbs.add_parser("frontier", parents=[where], help="a figure's best so far, over time")
    one.set_defaults(action=frontier)
    one.add_argument("--figure", required=True, metavar="NAME")
    one.add_argument("--card", help="this card alone")
    one.add_argument("--plot", type=Path, default=Path("frontier.png"), help="the picture (%(default)s)")

    one = verbs.add_parser("lineage", parents=[where], help="what each step to a record gave")
    one.set_defaults(action=way)
    one.add_argument("name")
    one.add_argument("--figure", metavar="NAME", help="(the record's first)")
    one.add_argument("--plot", type=Path, default=Path("lineage.png"), help="the picture (%(default)s)")

    verbs.add_parser("check", parents=[where], help="validate every record").set_defaults(action=check_all)
    verbs.add_parser("schema", help="print the JSON schema of a record").set_defaults(action=print_schema)
    return made


if __name__ == "__main__":
    sys.exit(run(parser(), history))
