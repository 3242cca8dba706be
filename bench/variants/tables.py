"""The sweep as tables: for the terminal, for Markdown, and a CSV with a line a variant."""

import csv
import io
from collections.abc import Sequence

from bench.latency_result import CATEGORIES, PROTOCOLS, Protocol, Summary
from bench.table import Cell, Table
from bench.variants.result import Standing, SweepResult, VariantResult

Results = Sequence[VariantResult]


def tables(sweep: SweepResult, results: Results) -> list[Table]:
    """Standings and latencies; the second only where there are some."""
    made = [standings_table(sweep, results)]
    return [*made, latency_table(results)] if any(result.latency for result in results) else made


def standings_table(sweep: SweepResult, results: Results) -> Table:
    """A row a variant: weights, speed, every gate, where it stands."""
    gates = gate_names(results)
    rows: list[list[Cell]] = []
    for result, standing in zip(results, sweep.standings, strict=True):
        weights, scores = result.weights, {gate.gate: gate for gate in result.gates}
        row: list[Cell] = [result.variant.name]
        row += [weights.bytes / 1e6, f"{weights.bits:.2f}"] if weights else [None, None]
        row += [None if weights is None or weights.divergence is None else f"{weights.divergence:.5f}"]
        row += [None if standing.speed is None else f"{standing.speed:.2f}"]
        row += [f"{100 * scores[name].score:.1f}" if name in scores else None for name in gates]
        row += [None if standing.quality is None else f"{standing.quality:+.1f}", _remark(sweep, standing)]
        rows.append(row)
    header = ["variant", "MB", "bits", "mean KLD", "speed", *(f"{name} %" for name in gates), "margin", ""]
    return Table(header, rows, title=f"{sweep.source}: which variant to ship", notes=notes(sweep, results))


def latency_table(results: Results) -> Table:
    """A row a variant: the median of each category under each protocol, milliseconds."""
    columns = latency_columns(results)
    streamed = any(line.first_token for result in results for line in by_column(result).values())
    rows: list[list[Cell]] = []
    for result in results:
        lines = by_column(result)
        row: list[Cell] = [result.variant.name]
        for column in columns:
            line = lines.get(column)
            row += [1000 * line.latency.p50 if line and line.latency else None]
            if streamed:
                row += [1000 * line.first_token.p50 if line and line.first_token else None]
        rows.append(row)
    header = ["variant"]
    for category, protocol in columns:
        header += [f"{category}, {protocol}", *(["TTFT"] if streamed else [])]
    what = "Request latency and time to first token" if streamed else "Request latency"
    return Table(header, rows, title=f"{what}, medians, ms")


def notes(sweep: SweepResult, results: Results) -> list[str]:
    """What the figures of the first table mean."""
    made = []
    if sweep.baseline is not None:
        made.append(f"speed: mean of {sweep.baseline.name} / median, over categories and protocols")
    if any(gate.threshold is not None for result in results for gate in result.gates):
        made.append("margin: points from the threshold at the gate where they are fewest")
    tokens = next((r.weights.divergence_tokens for r in results if r.weights and r.weights.divergence), None)
    if tokens:
        made.append(f"mean KLD: nats from the whole model over {tokens:,} tokens of its own evaluation text")
    return [*made, *sweep.notes]


def csv_text(sweep: SweepResult, results: Results) -> str:
    """One line a variant, plain numbers: shares of 1, seconds, bytes, nats."""
    columns, gates = latency_columns(results), gate_names(results)
    rows: list[dict[str, Cell]] = []
    for result, standing in zip(results, sweep.standings, strict=True):
        weights, lines = result.weights, by_column(result)
        scores = {gate.gate: gate for gate in result.gates}
        row: dict[str, Cell] = {
            "variant": result.variant.name,
            "weights": result.variant.level,
            "settings": " ".join(f"{name}={value}" for name, value in result.variant.server.items()),
            "bytes": weights.bytes if weights else None,
            "bits_per_weight": weights.bits if weights else None,
            "mean_kld": weights.divergence if weights else None,
            "p99_kld": weights.divergence_p99 if weights else None,
            "same_top": weights.same_top if weights else None,
            "speed": standing.speed,
            "margin_points": standing.quality,
            "verdict": standing.verdict,
            "pareto_front": int(standing.front),
            "recommended": int(standing.name == sweep.recommended),
        }
        for name in gates:
            gate = scores.get(name)
            for field in ("score", "low", "high", "threshold", "items", "verdict"):
                row[f"{name}_{field}"] = getattr(gate, field) if gate else None
        for category, protocol in columns:
            line = lines.get((category, protocol))
            where = f"{category}_{protocol}"
            row[f"{where}_seconds"] = line.latency.p50 if line and line.latency else None
            row[f"{where}_first_token_seconds"] = line.first_token.p50 if line and line.first_token else None
        row["error"] = standing.error
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def gate_names(results: Results) -> list[str]:
    """Every gate that some variant was asked, in order."""
    return list(dict.fromkeys(gate.gate for result in results for gate in result.gates))


def latency_columns(results: Results) -> list[tuple[str, Protocol]]:
    """Every (category, protocol) that some variant was timed in, in the protocol's order."""
    found = {column for result in results for column in by_column(result)}
    return [(name, protocol) for name in CATEGORIES for protocol in PROTOCOLS if (name, protocol) in found]


def by_column(result: VariantResult) -> dict[tuple[str, Protocol], Summary]:
    """A variant's latency lines by (category, protocol)."""
    lines = result.latency.summaries if result.latency is not None else []
    return {(line.category, line.protocol): line for line in lines}


def _remark(sweep: SweepResult, standing: Standing) -> str:
    if standing.error is not None:
        return "FAILED"
    parts: list[str] = [standing.verdict or "no threshold"]
    if standing.front:
        parts.append("front")
    if standing.name == sweep.recommended:
        parts.append("ship")
    return ", ".join(parts)
