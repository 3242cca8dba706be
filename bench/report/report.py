"""From a store: tables, pictures, one HTML page and the same in Markdown; and what is published."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from bench.errors import BenchError
from bench.report.publish import publish_results
from bench.report.views import pictures_of, tables_of
from bench.store import Manifest, Results, load, write_atomically
from bench.terminal import Table, show

# what matplotlib writes around a picture for other programs than a browser that has the page already
XML_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
NAMESPACE = re.compile(r'\sxmlns(:\w+)?="[^"]*"')


@dataclass(frozen=True, slots=True)
class Section:
    """One run on the page."""

    title: str
    status: str
    tables: Sequence[Table]
    pictures: Mapping[str, Path]
    facts: Mapping[str, str]


def report(
    *paths: Path,
    out: Path | None = None,
    publish: Path | None = None,
    page: Path | None = None,
    reference: str | None = None,
) -> int:
    """Tables, pictures and one page (HTML, Markdown) of everything in a store.

    Parameters
    ----------
    paths
        Stores, or folders of single runs.
    out
        Where report.html, report.md and the pictures go (the first store).
    publish
        Write a summary for a repository into this folder instead: README.md, summary.csv, runs.json and the
        pictures, without single requests.
    page
        With --publish: put the headline table into this Markdown file, between its lines
        <!-- headline --> and <!-- end -->.
    reference
        With --publish: the subject that ratios are against (the first).
    """
    if not paths:
        raise BenchError("want at least one store or run, such as results/")
    results = load(list(paths))
    folder = publish or out or paths[0]
    try:
        if publish is not None:
            written = publish_results(results, folder, reference=reference, page=page)
        else:
            written = write_page(results, folder)
    except OSError as error:
        raise BenchError(f"{folder}: cannot be written: {error.strerror}") from error
    for path in written:
        print(f"wrote {path}")
    return 0


def write_page(results: Results, folder: Path) -> list[Path]:
    """report.html, which needs nothing beside it, report.md and its pictures; prints the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = folder / "pictures"
    sections = [make_section(results, name, pictures) for name in results.manifests]
    for table in (table for section in sections for table in section.tables):
        table.print()
    title = f"{len(sections)} run{'s' if len(sections) > 1 else ''} in {folder.resolve().name}"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.get_template("page.html.j2")
    page = template.render(title=title, sections=sections, show=show, inline=_inline)
    write_atomically(folder / "report.html", page + "\n")
    write_atomically(folder / "report.md", markdown(title, sections, folder))
    drawn = [path for section in sections for path in section.pictures.values()]
    return [folder / "report.html", folder / "report.md", *drawn]


def make_section(results: Results, run: str, pictures: Path) -> Section:
    """One run: what its verb shows, the pictures there are figures for, and how it was made."""
    manifest = results.manifests[run]
    title = f"{manifest.verb}, {manifest.started:%Y-%m-%d %H:%M} UTC, {manifest.card or 'no card'}"
    drawn = pictures_of(results, run, pictures)
    return Section(title, manifest.status, tables_of(results, run), drawn, facts(manifest))


def facts(manifest: Manifest) -> dict[str, str]:
    """How a run was made, as a page shows it."""
    said = {
        "command": " ".join(manifest.command),
        "run": manifest.run,
        "took": f"{manifest.seconds:,.0f} s",
        "commit": manifest.commit or "unknown",
        "card": manifest.card or "none",
        "driver": manifest.driver or "",
        "client": ", ".join(manifest.host.values()),
        "versions": _listed(manifest.versions),
        "settings": _listed(manifest.settings),
        **{name: _listed(about) for name, about in manifest.subjects.items()},
        "notes": "; ".join(manifest.notes),
    }
    return {name: text for name, text in said.items() if text}


def markdown(title: str, sections: Sequence[Section], folder: Path) -> str:
    """The same page in Markdown, pictures as links to their files."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        if section.status != "finished":
            parts.append(f"This run did not finish ({section.status}).")
        parts += [
            f"![{name}]({path.relative_to(folder).as_posix()})" for name, path in section.pictures.items()
        ]
        parts += [table.markdown().strip() for table in section.tables]
        parts.append("\n".join(f"- {name}: {value}" for name, value in section.facts.items()))
    return "\n\n".join(parts) + "\n"


def _listed(group: Mapping[str, object]) -> str:
    return ", ".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value, default=str)}"
        for name, value in group.items()
        if value not in (None, {}, [])
    )


def _inline(path: Path) -> Markup:
    """An SVG file as an element of an HTML page: no XML head, no metadata, no names of namespaces."""
    svg = NAMESPACE.sub("", METADATA.sub("", XML_HEAD.sub("", path.read_text(encoding="utf-8"))))
    return Markup(svg)
