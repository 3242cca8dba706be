"""``qwen-bench report``: tables, charts and a page of a store, comparisons, and published summaries."""

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
    """Report on recorded runs: tables, charts and a page, or a comparison.

    - `qwen-bench report results`
    - `qwen-bench report results/RUN-A results/RUN-B --compare --metric latency`

    --compare prints medians with ratios to the reference. Above 1 is better. Rounds of one run are paired, so
    drift of the machine affects both subjects equally. A ratio across runs contains the drift between the
    runs, and the table says so.

    Parameters
    ----------
    paths
        Stores, or folders of single runs.
    compare
        Print a comparison of the subjects of one or several runs, without writing files.
    metric
        Metric to show with --compare; may be repeated (default: all).
    subject
        Subject to show with --compare, by its name in the table; may be repeated (default: all).
    out
        Folder of report.html and the charts (default: the first store).
    publish
        Folder for a summary instead of the page: README.md, summary.csv, runs.json and charts, without single
        requests.
    page
        Markdown file into which --publish writes the headline table, between the lines `<!-- headline -->`
        and `<!-- end -->`.
    reference
        Reference of the ratios with --compare or --publish (default: the first run's reference, else its
        first subject).
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
    """Write a self-contained report.html and charts, and print the tables. Returns the files."""
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
