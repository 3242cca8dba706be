"""The sweep as one HTML file that needs nothing beside it, and as Markdown."""

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.table import Table, show
from bench.variants.result import SweepResult, VariantResult
from bench.variants.tables import tables

STYLE = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem;
       margin: 2rem auto; padding: 0 1.2rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem }
th, td { padding: .28rem .7rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap }
th { border-bottom: 1px solid #888 } th:first-child, td:first-child { text-align: left }
tr.ship td { background: #eaf5ee; font-weight: 600 } tr.failed td { color: #a33 }
.scroll { overflow-x: auto } .advice { background: #f5f7f9; border-left: 4px solid #0072b2;
       padding: .6rem 1rem } .advice p { margin: .35rem 0 }
svg { max-width: 100%; height: auto } .note { color: #555; font-size: .85rem; margin: .2rem 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .87rem }
dt { color: #666 } dd { margin: 0; overflow-wrap: anywhere }
"""
# what matplotlib writes around a picture for other programs than a browser that has the page already
XML_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
NAMESPACE = re.compile(r'\sxmlns(:\w+)?="[^"]*"')


def page(sweep: SweepResult, results: Sequence[VariantResult], pictures: Mapping[str, Path]) -> str:
    """The whole document: advice, tables, pictures, and what they were made with."""
    ship, failed = sweep.recommended, {s.name for s in sweep.standings if s.error is not None}
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(sweep.source)}: variants</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{_text(sweep.source)}: which variant to ship</h1>",
        f'<div class="advice">{"".join(f"<p>{_text(line)}</p>" for line in sweep.advice)}</div>',
    ]
    for table in tables(sweep, results):
        parts.append(f"<h2>{_text(table.title)}</h2>")
        parts.append(f'<div class="scroll">{_table(table, ship, failed)}</div>')
        parts += [f'<p class="note">{_text(note)}</p>' for note in table.notes]
    for title, path in pictures.items():
        parts.append(f"<h2>{_text(title)}</h2>")
        parts.append(f'<div class="scroll">{inline(path.read_text(encoding="utf-8"))}</div>')
    errors = [(s.name, s.error) for s in sweep.standings if s.error is not None]
    if errors:
        parts.append("<h2>What failed</h2>")
        parts += [f"<h3>{_text(name)}</h3><pre>{_text(error)}</pre>" for name, error in errors]
    parts += ["<h2>Made with</h2>", _facts(about(sweep, results)), "</body></html>"]
    return "\n".join(parts) + "\n"


def markdown(sweep: SweepResult, results: Sequence[VariantResult], pictures: Mapping[str, Path]) -> str:
    """The same in Markdown, the pictures as links to their files."""
    parts = [f"# {sweep.source}: which variant to ship", *sweep.advice]
    parts += [table.markdown() for table in tables(sweep, results)]
    parts += [f"![{title}]({path.name})" for title, path in pictures.items()]
    parts += [
        "## Made with",
        "\n".join(f"- {name}: {value}" for name, value in about(sweep, results).items()),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def about(sweep: SweepResult, results: Sequence[VariantResult]) -> dict[str, str]:
    """How and where the sweep was made."""
    made = {
        "command": " ".join(sweep.command),
        "begun": f"{sweep.started:%Y-%m-%d %H:%M} UTC",
        "processor": f"{sweep.host['processor']}, {sweep.host['cores']} cores, {sweep.host['memory']}",
        "card": sweep.card or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in sweep.versions.items()),
        "settings": ", ".join(f"{name} {value}" for name, value in sweep.settings.items()),
    }
    for result in results:
        settings = ", ".join(f"{name} = {value}" for name, value in result.variant.server.items())
        seconds = ", ".join(f"{name} {spent:.0f} s" for name, spent in result.stage_seconds.items())
        told = "; ".join(filter(None, [result.variant.about, settings, seconds]))
        if told:
            made[result.variant.name] = told
    return made


def inline(svg: str) -> str:
    """An SVG file as an element of an HTML page: no XML head, no metadata, no names of namespaces."""
    return NAMESPACE.sub("", METADATA.sub("", XML_HEAD.sub("", svg)))


def _table(table: Table, ship: str | None, failed: set[str]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in table.header)
    rows = []
    for row in table.rows:
        name = str(row[0])
        kind = ' class="ship"' if name == ship else ' class="failed"' if name in failed else ""
        rows.append(f"<tr{kind}>{''.join(f'<td>{_text(show(cell))}</td>' for cell in row)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _facts(facts: Mapping[str, str]) -> str:
    lines = (f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items())
    return f"<dl>{''.join(lines)}</dl>"


def _text(text: str) -> str:
    return html.escape(text)
