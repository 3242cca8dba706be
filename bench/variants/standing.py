"""Ranking the variants: speed, quality, the Pareto front, and which one to ship."""

from collections.abc import Iterable, Sequence
from statistics import mean

from bench.gates.estimate import wilson
from bench.gates.gate import Verdict, verdict
from bench.gates.result import GateScore
from bench.latency_result import Baseline, Protocol, Summary
from bench.variants.result import Standing, VariantResult


def baseline_of(result: VariantResult) -> Baseline:
    """A variant's own medians, for the others to be compared with."""
    seconds: dict[Protocol, dict[str, float]] = {"official": {}, "distinct": {}}
    for line in _lines(result):
        if line.latency is not None:
            seconds[line.protocol][line.category] = line.latency.p50
    return Baseline(name=result.variant.name, seconds=seconds)


def rank(results: Sequence[VariantResult], baseline: Baseline | None) -> list[Standing]:
    """Everyone's standing, in the order given."""
    alone = [_alone(result, baseline) for result in results]
    front = pareto_front(
        [(s.name, s.speed, s.quality) for s in alone if s.speed is not None and s.quality is not None]
    )
    return [standing.model_copy(update={"front": standing.name in front}) for standing in alone]


def pareto_front(points: Sequence[tuple[str, float, float]]) -> set[str]:
    """The names of the points that no other is at least as good as in both figures and better in one."""
    return {
        name
        for name, x, y in points
        if not any(ox >= x and oy >= y and (ox > x or oy > y) for _, ox, oy in points)
    }


def advise(results: Sequence[VariantResult], standings: Sequence[Standing]) -> tuple[str | None, list[str]]:
    """The fastest variant that passes every gate, or None; and what to know about the choice."""
    by_name = {result.variant.name: result for result in results}
    ranked = sorted((s for s in standings if s.speed is not None), key=lambda s: -(s.speed or 0.0))
    broken = [
        f"{s.name} could not be measured: {s.error.splitlines()[0].removesuffix(':')}"
        for s in standings
        if s.error is not None
    ]
    if not ranked:
        return None, ["No variant could be measured: there is nothing to recommend.", *broken]
    judged = [s for s in ranked if s.verdict is not None]
    if not judged:
        first = f"No gate with a threshold was asked: none is recommended. The fastest is {ranked[0].name}."
        return None, [first, *broken]
    passing = [s for s in judged if s.verdict == "pass"]
    open_ = [s for s in judged if s.verdict == "undecided"]
    advice: list[str] = []
    best = passing[0] if passing else None
    if best is not None:
        advice.append(_ship(best, len(passing), by_name[best.name]))
        advice += [_alike(best, other, by_name) for other in passing[1:] if _overlap(best, other, by_name)]
        open_ = [s for s in open_ if (s.speed or 0.0) > (best.speed or 0.0)]
    elif open_:
        advice.append(
            "No variant is known to pass every gate: at this sample size the best are undecided. "
            "Ask more items (--limit)."
        )
    else:
        nearest = max(judged, key=lambda s: s.quality if s.quality is not None else -100.0)
        advice.append(
            f"No variant passes every gate. {nearest.name} comes nearest: it lacks "
            f"{-(nearest.quality or 0.0):.1f} points at {nearest.tightest}."
        )
    advice += [_undecided(s, by_name[s.name], faster=best is not None) for s in open_]
    advice += [_failed(s, by_name[s.name]) for s in judged if s.verdict == "fail"]
    return (best.name if best is not None else None), advice + broken


def margin(gates: Iterable[GateScore]) -> tuple[float | None, str | None]:
    """(the least distance from a threshold in points of 100, at which gate); the mean score without any."""
    gates = list(gates)
    distances = {g.gate: 100 * (g.score - g.threshold) for g in gates if g.threshold is not None}
    if distances:
        tightest = min(distances, key=lambda name: distances[name])
        return distances[tightest], tightest
    return (100 * mean(gate.score for gate in gates), None) if gates else (None, None)


def verdict_of(gates: Iterable[GateScore]) -> Verdict | None:
    """Of all gates together: fail if one fails, else undecided if one is, else pass; or None."""
    verdicts = {gate.verdict for gate in gates}
    order: tuple[Verdict, ...] = ("fail", "undecided", "pass")
    return next((verdict for verdict in order if verdict in verdicts), None)


def items_to_decide(gate: GateScore) -> int | None:
    """About how many items would decide if the score stayed as it is; None if only all of them do."""
    if gate.threshold is None:
        return None
    for items in range(gate.items + 1, gate.items_in_all):
        low, high = wilson(gate.score, items)
        if verdict(gate.score, low, high, gate.threshold, complete=False) != "undecided":
            return items
    return None


def _alone(result: VariantResult, baseline: Baseline | None) -> Standing:
    quality, tightest = margin(result.gates)
    return Standing(
        name=result.variant.name,
        speed=None if result.error is not None else _speed(result, baseline),
        quality=None if result.error is not None else quality,
        tightest=tightest,
        verdict=None if result.error is not None else verdict_of(result.gates),
        front=False,
        error=result.error,
    )


def _speed(result: VariantResult, baseline: Baseline | None) -> float | None:
    if baseline is None:
        return None
    ratios = [
        baseline.seconds[line.protocol][line.category] / line.latency.p50
        for line in _lines(result)
        if line.latency is not None and line.category in baseline.seconds.get(line.protocol, {})
    ]
    return mean(ratios) if ratios else None


def _lines(result: VariantResult) -> list[Summary]:
    return result.latency.summaries if result.latency is not None else []


def _overlap(best: Standing, other: Standing, by_name: dict[str, VariantResult]) -> bool:
    """Whether the timed runs of two variants overlap, p10 to p90, in every category and protocol."""
    mine = {(line.category, line.protocol): line.latency for line in _lines(by_name[best.name])}
    for line in _lines(by_name[other.name]):
        ours, theirs = mine.get((line.category, line.protocol)), line.latency
        if ours is None or theirs is None or ours.p90 < theirs.p10 or theirs.p90 < ours.p10:
            return False
    return True


def _ship(best: Standing, passing: int, result: VariantResult) -> str:
    tightest = next(gate for gate in result.gates if gate.gate == best.tightest)
    sampled = tightest.low is not None and tightest.items < tightest.items_in_all
    low = f" (95% interval from {100 * (tightest.low or 0.0):.1f}%)" if sampled else ""
    among = "the only one that passes" if passing == 1 else f"the fastest of the {passing} that pass"
    return (
        f"Ship {best.name}: {among} every gate, speed {best.speed:.2f}. Its margin is "
        f"{best.quality:+.1f} points at the tightest gate, {best.tightest}: {100 * tightest.score:.1f}%{low} "
        f"against {100 * (tightest.threshold or 0.0):.1f}%."
    )


def _alike(best: Standing, other: Standing, by_name: dict[str, VariantResult]) -> str:
    return (
        f"{other.name} passes too, and these runs do not tell its speed from {best.name}'s "
        f"({other.speed:.2f}; p10 to p90 overlap in every category); its margin is "
        f"{other.quality:+.1f} points."
    )


def _undecided(standing: Standing, result: VariantResult, *, faster: bool) -> str:
    gates = [gate for gate in result.gates if gate.verdict == "undecided"]
    parts = []
    for gate in gates:
        needed = items_to_decide(gate)
        want = (
            f"all {gate.items_in_all:,} items decide"
            if needed is None
            else f"about {needed:,} of {gate.items_in_all:,} items would decide"
        )
        low, high = (100 * (value if value is not None else gate.score) for value in (gate.low, gate.high))
        parts.append(
            f"{gate.gate} ({100 * gate.score:.1f}%, 95% from {low:.1f} to {high:.1f}, threshold "
            f"{100 * (gate.threshold or 0.0):.1f}; {want})"
        )
    lead = "is faster" if faster else "has speed"
    gap = "; ".join(parts)
    return f"{standing.name} {lead} ({standing.speed:.2f}) but undecided at this sample size: {gap}."


def _failed(standing: Standing, result: VariantResult) -> str:
    gates = [gate for gate in result.gates if gate.verdict == "fail"]
    parts = [f"{g.gate} ({100 * g.score:.1f}% against {100 * (g.threshold or 0.0):.1f}%)" for g in gates]
    return f"{standing.name} fails {', '.join(parts)}."
