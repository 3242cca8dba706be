"""The sweep's own picture: speed against quality, where every variant stands."""

from pathlib import Path

from bench.report.pictures import draw_speed_quality
from bench.store import Results
from bench.variants.standing import rank


def sweep_pictures(results: Results, folder: Path, prefix: str) -> dict[str, Path]:
    """Of each run of the sweep; none where nothing was timed or no gate was asked."""
    made: dict[str, Path] = {}
    for run in results.manifests:
        ranking = rank(results, run)
        if any(one.speed is not None and one.quality is not None for one in ranking.standings):
            path = folder / f"{prefix}speed-quality.svg"
            made["Speed against quality"] = draw_speed_quality(ranking.standings, ranking.recommended, path)
    return made
