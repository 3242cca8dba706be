"""Tables of `qwen-bench sweep`."""

from collections.abc import Mapping

import pandas as pd

from qwen_serve.bench.analysis.statistics import percentiles
from qwen_serve.bench.gates.estimate import Paired
from qwen_serve.bench.load.protocol import CATEGORIES, DISTINCT, OFFICIAL
from qwen_serve.bench.report.perplexity import WORKLOAD as DIVERGENCE
from qwen_serve.bench.store import Results
from qwen_serve.bench.terminal import Cell, Table
from qwen_serve.bench.variants.standing import LATENCY, Ranking, Standing, rank

VERB = "sweep"
ALL_GATES = "all gates"
WEIGHTS, FILE = "weights", "file"
"""The store's workload and cell of a GGUF's size and bits per weight."""


def sweep_tables(results: Results) -> list[Table]:
    """Tables for each sweep: standings with the recommendation, items lost and gained at each gate, and
    latencies if they were measured.
    """
    made: list[Table] = []
    for run, manifest in results.manifests.items():
        if manifest.verb == VERB:
            rows, ranking = results.of(run=run), rank(results, run)
            made.append(_standings(results, run, rows, ranking))
            if any(standing.paired is not None for standing in ranking.standings):
                made.append(_losses(ranking.standings))
            if (rows["metric"] == LATENCY).any():
                made.append(_latencies(rows, manifest.settings["variants"]))
    return made


def gate_names(standings: list[Standing]) -> list[str]:
    """All gates of the variants, in order."""
    return list(dict.fromkeys(gate.gate for standing in standings for gate in standing.gates))


def weights_of(rows: pd.DataFrame, name: str) -> Mapping[str, float]:
    """Size, bits per weight and divergence of a variant's GGUF, by metric, as far as recorded."""
    own = rows[(rows["subject"] == name) & rows["workload"].isin([WEIGHTS, DIVERGENCE])]
    return dict(zip(own["metric"], own["value"], strict=True))


def _standings(results: Results, run: str, rows: pd.DataFrame, ranking: Ranking) -> Table:
    """A table with a row for each variant: weights, speed, gates and rank."""
    manifest = results.manifests[run]
    gates = gate_names(ranking.standings)
    compared = any(standing.paired is not None for standing in ranking.standings)
    lines: list[list[Cell]] = []
    for standing in ranking.standings:
        weights, scores = weights_of(rows, standing.name), {gate.gate: gate for gate in standing.gates}
        kld = weights.get("kld_mean")
        bits = weights.get("bits_per_weight")
        line: list[Cell] = [standing.name, weights.get("size")]
        line += [None if bits is None else f"{bits:.2f}", None if kld is None else f"{kld:.5f}"]
        itself = standing.name == ranking.baseline
        line += ["1" if itself else None if standing.speed is None else str(standing.speed)]
        line += [f"{100 * scores[name].score:.1f}" if name in scores else None for name in gates]
        line.append(None if standing.quality is None else f"{standing.quality:+.1f}")
        if compared:
            line += paired_cells(standing)
        line.append(_remark(ranking, standing))
        lines.append(line)
    notes = list(ranking.advice)
    if any(standing.speed is not None for standing in ranking.standings):
        notes.append(
            f"speed: times as fast as {ranking.baseline}, geometric mean over categories and protocols, "
            "[95% interval], paired by round"
        )
    if any(standing.tightest is not None for standing in ranking.standings):
        notes.append("margin: points from the threshold at the gate where they are fewest")
    if compared:
        notes.append(
            "lost: items of all gates that full precision alone got right; gained: that it got wrong; p: how "
            "often equally good models differ by as much (McNemar's exact test)"
        )
    divergence = rows[rows["workload"] == DIVERGENCE]
    if len(divergence):
        tokens = divergence[divergence["metric"] == "scored_tokens"]["value"].max()
        cells = " and ".join(dict.fromkeys(divergence["cell"]))
        notes.append(
            f"KLD: mean, nats from the whole model, over {tokens:,.0f} tokens of its own evaluation text "
            f"({cells}: every position, not the second halves alone)"
        )
    header = ["variant", "MB", "bits", "KLD", "speed", *(f"{name} %" for name in gates), "margin"]
    header += ["lost", "gained", "p", ""] if compared else [""]
    title = f"{manifest.settings['source']}: which variant to ship"
    return Table(header, lines, title=title, notes=[*notes, *manifest.notes])


def _losses(standings: list[Standing]) -> Table:
    """A table with a row for each variant: items lost and gained against full precision at each gate, and the
    p value."""
    gates = [*gate_names(standings), ALL_GATES]
    lines: list[list[Cell]] = []
    for standing in standings:
        found = paired_of(standing)
        pairs = [found.get(gate) for gate in gates]
        if any(pairs):
            cells = [None if pair is None else f"{pair.lost}, {pair.gained}, {pair.p_text}" for pair in pairs]
            lines.append([standing.name, *cells])
    return Table(["variant", *gates], lines, title="Items lost, items gained against full precision, and p")


def _latencies(rows: pd.DataFrame, names: list[str]) -> Table:
    """A table with a row for each variant: the median latency of each category under each protocol, in ms."""
    found = {metric: percentiles(rows, metric, "subject", "workload", "cell") for metric in (LATENCY, "ttft")}
    columns = [
        (protocol, category)
        for category in CATEGORIES
        for protocol in (OFFICIAL, DISTINCT)
        if any((name, protocol, category) in found[LATENCY] for name in names)
    ]
    streamed = bool(found["ttft"])
    header = ["variant"]
    for protocol, category in columns:
        header += [f"{category}, {protocol}", *(["TTFT"] if streamed else [])]
    lines: list[list[Cell]] = []
    for name in names:
        line: list[Cell] = [name]
        for protocol, category in columns:
            for metric in (LATENCY, "ttft") if streamed else (LATENCY,):
                spread = found[metric].get((name, protocol, category))
                line.append(None if spread is None else spread.p50)
        lines.append(line)
    what = "Request latency and time to first token" if streamed else "Request latency"
    return Table(header, lines, title=f"{what}, medians over all rounds, ms")


def paired_of(standing: Standing) -> dict[str, Paired | None]:
    """The comparison with full precision, by gate and over all gates."""
    return {gate.gate: gate.paired for gate in standing.gates} | {ALL_GATES: standing.paired}


def paired_cells(standing: Standing) -> list[Cell]:
    """Items lost and gained against full precision, and the p value."""
    if standing.paired is None:
        return [None, None, None]
    return [standing.paired.lost, standing.paired.gained, f"{standing.paired.p_value:.2g}"]


def _remark(ranking: Ranking, standing: Standing) -> str:
    if standing.error is not None:
        return "FAILED"
    parts: list[str] = [standing.verdict or "no threshold"]
    if standing.front:
        parts.append("front")
    if standing.name == ranking.recommended:
        parts.append("ship")
    return ", ".join(parts)
