"""``qwen-bench report --compare``: compares subjects of one run or of several."""

from collections.abc import Sequence

import pandas as pd

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.client import clip
from qwen_serve.bench.report.tables import compared_metrics, own_reference, subjects_table
from qwen_serve.bench.store import Manifest, Results
from qwen_serve.bench.terminal import Cell, Table

HOW = {"verb", "commit", "card", "driver", "host", "versions", "settings"}
"""Keys of a manifest that may explain a difference between runs."""
LONGEST = 60
"""Maximum number of characters of a setting in the table."""


def print_comparison(
    results: Results, *, reference: str | None = None, metrics: Sequence[str] = (), only: Sequence[str] = ()
) -> None:
    """Print medians with ratios to ``reference``, and the differences between the runs' conditions.

    Subjects have the table's names. Rounds are paired within a run but not across runs; the table says which.
    Raises BenchError for an unknown subject or metric, or if there is only one subject.
    """
    results = named_apart(results)
    subjects = list(dict.fromkeys(results.frame["subject"]))
    for name in (*only, *([reference] if reference is not None else [])):
        if name not in subjects:
            raise BenchError(f"{name}: not measured; there are {', '.join(subjects)}")
    if len(subjects) < 2:
        raise BenchError(f"one subject alone, {''.join(subjects)}: want two or more to compare")
    first = reference or own_reference(results)
    if only:
        wanted = {first, *only}
        results = Results(results.of(subject=sorted(wanted)), results.manifests)
    known = compared_metrics(results.frame)
    if unknown := [name for name in metrics if name not in known]:
        raise BenchError(f"--metric {unknown[0]}: not measured; there are {', '.join(known)}")
    subjects_table(results, metrics or None, reference=first).print()
    differing = differences(list(results.manifests.values()))
    if differing is not None:
        differing.print()


def named_apart(results: Results) -> Results:
    """The same results, with the run in the name of each subject that several runs have."""
    frame = results.frame
    runs = frame.groupby("subject")["run"].nunique()
    shared = frame["subject"].isin(runs[runs > 1].index)
    names = pd.Series(frame["run"] + ": " + frame["subject"], index=frame.index)
    return Results(frame.assign(subject=frame["subject"].mask(shared, names)), results.manifests)


def differences(manifests: Sequence[Manifest]) -> Table | None:
    """A table of the conditions that differ between the runs; None if none do."""
    said = pd.json_normalize([one.model_dump(mode="json", include=HOW) for one in manifests], sep=" ")
    said = said.fillna("").map(lambda value: clip(str(value), LONGEST))
    rows: list[list[Cell]] = [
        [str(name).removeprefix("settings "), *values]
        for name, values in said.items()
        if values.nunique() > 1
    ]
    if not rows:
        return None
    return Table(["differs", *(one.run for one in manifests)], rows, title="Made differently")
