"""Tables of `qwen-bench quality perplexity`."""

from collections.abc import Mapping
from typing import Any

from qwen_serve.bench.store import Results
from qwen_serve.bench.terminal import Cell, Table

WORKLOAD = "divergence"
"""The store's workload, with a cell for each range of positions."""

FEW_TOKENS = 10_000  # with fewer tokens, the last percent has fewer than a hundred tokens

LINES = {
    "perplexity": ("perplexity", 4),
    "reference_perplexity": ("  of the reference", 4),
    "log_ratio": ("  ln(model / reference)", 5),
    "kld_mean": ("KL divergence, nats: mean", 5),
    "kld_median": ("  median", 5),
    "kld_p90": ("  90%", 5),
    "kld_p99": ("  99%", 5),
    "kld_p999": ("  99.9%", 5),
    "kld_max": ("  maximum", 5),
    "same_top": ("same first choice, %", 2),
}
"""Metric -> (title, decimals)."""


def positions(first: int, last: int, context: int) -> str:
    """Name of a cell: the positions of each chunk that are compared, from 0. Figures of different cells are
    not comparable: two models differ less, the more context a token has."""
    return f"positions {first} to {last} of {context}"


def perplexity_tables(results: Results) -> list[Table]:
    """A table for each run, file and range of positions, with a row for each metric and its standard
    error."""
    made: list[Table] = []
    runs = [name for name, manifest in results.manifests.items() if manifest.verb == "perplexity"]
    rows = results.of(run=runs, workload=WORKLOAD)
    for (run, subject, cell), of_cell in rows.groupby(["run", "subject", "cell"], sort=False):
        manifest = results.manifests[str(run)]
        about = manifest.subjects.get(str(subject), {})
        values = dict(zip(of_cell["metric"], of_cell["value"], strict=True))
        lines: list[list[Cell]] = []
        for metric, (title, places) in LINES.items():
            error = values.get(f"{metric}_error")
            lines.append(
                [
                    title,
                    f"{values[metric]:.{places}f}",
                    None if error is None else f"{error:.{places}f}",
                ]
            )
        made.append(
            Table(
                ["figure", "value", "+-"],
                lines,
                title=f"{subject} against {about.get('reference')}: {values['scored_tokens']:,.0f} tokens of "
                f"{manifest.settings.get('text')}, {cell}",
                notes=[*_notes(values, about), *manifest.notes],
            )
        )
    return made


def _notes(values: Mapping[str, float], about: Mapping[str, Any]) -> list[str]:
    reference_bytes = about.get("reference_bytes", 0)
    notes = [f"{values['size']:,.2f} MB; the reference has {reference_bytes / 1e6:,.2f} MB"]
    ours, theirs = about.get("text_tokens", 0), about.get("reference_text_tokens", 0)
    if ours != theirs:
        notes += [
            f"the reference gives {values['dropped']:.4f}% to tokens that the model does not have; "
            "divergence is over the others",
            f"the text is {ours:,} tokens here, {theirs:,} there ({100 * (ours / theirs - 1):+.2f}%); "
            "both read the former",
        ]
    return notes
