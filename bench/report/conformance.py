"""Conformance runs as tables: counts by theme, and what failed."""

from bench.store import Results
from bench.terminal import Cell, Table

WORKLOAD = "conformance"


def conformance_tables(results: Results) -> list[Table]:
    """For each run and server the counts by theme; failures with their reasons are its notes."""
    made: list[Table] = []
    for (run, subject), rows in results.of(workload=WORKLOAD).groupby(["run", "subject"], sort=False):
        manifest = results.manifests[str(run)]
        about = manifest.subjects.get(str(subject), {})
        checks = rows.pivot(index="cell", columns="metric", values="value").reindex(
            index=list(dict.fromkeys(rows["cell"])), columns=["passed", "skipped", "seconds"]
        )
        checks["failed"] = checks["passed"] == 0
        counts = checks.assign(passed=checks["passed"].fillna(0), skipped=checks["skipped"].fillna(0))
        themes = counts.groupby(lambda name: str(name).partition(".")[0], sort=False).sum()
        themes.loc["all"] = themes.sum()
        lines: list[list[Cell]] = [
            [
                str(theme),
                *(int(line[name]) for name in ("passed", "failed", "skipped")),
                float(line["seconds"]),
            ]
            for theme, line in themes.iterrows()
        ]
        details = about.get("details", {})
        failed = [f"FAILED {name}: {details.get(name, '')}" for name in checks.index[checks["failed"]]]
        made.append(
            Table(
                ["theme", "passed", "failed", "skipped", "seconds"],
                lines,
                title=f"Conformance of {subject} ({about.get('model') or 'its model'})",
                notes=[*failed, *manifest.notes],
            )
        )
    return made
