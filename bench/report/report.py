"""``qwen-bench report``: tables, charts and one page of a store; runs side by side; published results."""

from base64 import b64encode
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from jinja2 import Environment, FileSystemLoader

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.report.compare import print_comparison
from qwen_serve.bench.report.publish import publish_results
from qwen_serve.bench.report.views import pictures_of, tables_of
from qwen_serve.bench.store import Results, load, write_atomically
from qwen_serve.bench.terminal import show


def report(
    *paths: Path,
    compare: Annotated[bool, Parameter(negative=())] = False,
    metric: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    subject: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    out: Path | None = None,
    publish: Path | None = None,
    page: Path | None = None,
    reference: str | None = None,
) -> int:
    """Tables, charts and one page of everything in a store; or its subjects side by side.

    - `qwen-bench report results`
    - `qwen-bench report results/RUN-A results/RUN-B --compare --metric latency`

    With --compare: medians, and how many times as good as the reference. Within a run rounds are paired, so
    that drift of the machine affects both equally. Across runs they are not: the ratio contains the drift
    between the runs, and the table says so.

    Parameters
    ----------
    paths
        Stores, or folders of single runs.
    compare
        Print subjects of one run or of several side by side, and write nothing.
    metric
        With --compare: only this metric; may be repeated.
    subject
        With --compare: only this subject, as the table names it; may be repeated.
    out
        Folder of report.html and the pictures (default: the first store).
    publish
        Write a summary for a repository into this folder instead: README.md, summary.csv, runs.json and the
        pictures, without single requests.
    page
        With --publish: put the headline table into this Markdown file, between its lines
        `<!-- headline -->` and `<!-- end -->`.
    reference
        With --compare or --publish: the reference of the ratios (default: the first run's own reference, else
        its first subject).
    """
    if not paths:
        raise BenchError("want at least one store or run, such as results/")
    for flag, given in (("--metric", metric), ("--subject", subject)):
        if given and not compare:
            raise BenchError(f"{flag} {given[0]}: goes with --compare alone")
    results = load(list(paths))
    if compare:
        print_comparison(results, reference=reference, metrics=metric, only=subject)
        return 0
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
    """Writes a self-contained report.html and its charts; prints the tables."""
    sections: list[dict[str, Any]] = [
        {
            "manifest": manifest,
            "tables": tables_of(results, run),
            "pictures": pictures_of(results, run, folder / "pictures"),
        }
        for run, manifest in results.manifests.items()
    ]
    for table in (table for section in sections for table in section["tables"]):
        table.print()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("page.html.j2").render(
        title=f"{len(sections)} run{'s' if len(sections) > 1 else ''} in {folder.resolve().name}",
        sections=sections,
        show=show,
        encoded=lambda path: b64encode(path.read_bytes()).decode(),
    )
    write_atomically(folder / "report.html", page + "\n")
    return [folder / "report.html", *(path for one in sections for path in one["pictures"].values())]
