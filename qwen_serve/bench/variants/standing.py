"""Ranks the variants of a sweep by speed and quality, and recommends one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import pandas as pd

from qwen_serve.bench.analysis.statistics import Ratio, times_as_good
from qwen_serve.bench.gates.estimate import Paired, wilson
from qwen_serve.bench.gates.gate import Verdict, verdict
from qwen_serve.bench.gates.score import GateScore, gate_scores
from qwen_serve.bench.store import Manifest, Results

LATENCY = "latency"
FIRST = "first"
"""Value of --baseline: the first variant."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A variant's speed and quality.

    ``speed``: ratio to the baseline, the geometric mean over categories and protocols, so that the ranking
    does not depend on the baseline. ``quality``: the least distance of a gate's score from its threshold, in
    percentage points, at the gate ``tightest``; without thresholds the mean score. ``verdict``: pass if every
    gate passes, fail if one fails. ``front``: on the Pareto front, so no other variant is at least as good in
    both and better in one.
    """

    name: str
    gates: list[GateScore]
    speed: Ratio | None
    quality: float | None
    tightest: str | None
    verdict: Verdict | None
    front: bool
    error: str | None

    @property
    def paired(self) -> Paired | None:
        """The comparison with full precision, item by item over all gates; None unless all gates have
        recorded outcomes."""
        pairs = [gate.paired for gate in self.gates]
        known = [pair for pair in pairs if pair is not None]
        return sum(known, Paired(0, 0)) if known and len(known) == len(pairs) else None


@dataclass(frozen=True, slots=True)
class Ranking:
    """A sweep's standings, in the order of the variants, and a recommendation.

    ``baseline``: the reference of speeds, in words. ``recommended``: the fastest variant that passes every
    gate, or None. ``advice``: sentences about the choice and its reasons.
    """

    standings: list[Standing]
    baseline: str
    recommended: str | None
    advice: list[str]


def rank(results: Results, run: str) -> Ranking:
    """Rank the variants of one run of a sweep."""
    manifest = results.manifests[run]
    rows = results.of(run=run)
    names: list[str] = manifest.settings["variants"]
    errors = {name: manifest.subjects.get(name, {}).get("error") for name in names}
    usable = [name for name in names if errors[name] is None]
    speeds, baseline = _speeds(rows, usable, manifest)
    alone = [_alone(rows, name, speeds.get(name), errors[name]) for name in names]
    front = pareto_front(
        [(s.name, s.speed.value, s.quality) for s in alone if s.speed is not None and s.quality is not None]
    )
    standings = [replace(standing, front=standing.name in front) for standing in alone]
    recommended, advice = advise(rows, standings)
    return Ranking(standings, baseline, recommended, advice)


def pareto_front(points: Sequence[tuple[str, float, float]]) -> set[str]:
    """The names of the Pareto-optimal points: no other point is at least as good in both figures and better
    in one."""
    return {
        name
        for name, x, y in points
        if not any(ox >= x and oy >= y and (ox > x or oy > y) for _, ox, oy in points)
    }


def advise(rows: pd.DataFrame, standings: Sequence[Standing]) -> tuple[str | None, list[str]]:
    """(name, advice): the fastest variant that passes every gate, or the smallest if none was timed, or None;
    and sentences about the choice."""
    ranked = sorted((s for s in standings if s.speed is not None), key=lambda s: -_speed(s))
    broken = [
        f"{s.name} could not be measured: {s.error.splitlines()[0].removesuffix(':')}"
        for s in standings
        if s.error is not None
    ]
    if not ranked:
        smallest, said = _advise_by_size(rows, [s for s in standings if s.verdict is not None])
        return smallest, said + broken
    judged = [s for s in ranked if s.verdict is not None]
    if not judged:
        first = f"No gate with a threshold was asked: none is recommended. The fastest is {ranked[0].name}."
        alike = [_alike(rows, ranked[0], other) for other in ranked[1:]]
        return None, [first, *filter(None, alike), *broken]
    passing = [s for s in judged if s.verdict == "pass"]
    open_ = [s for s in judged if s.verdict == "undecided"]
    advice: list[str] = []
    best = passing[0] if passing else None
    if best is not None:
        advice.append(_ship(best, len(passing), "fastest", f"speed {best.speed}"))
        advice += filter(None, (_alike(rows, best, other) for other in passing[1:]))
        open_ = [s for s in open_ if _speed(s) > _speed(best)]
    else:
        advice.append(_none_passes(judged))
    advice += [_undecided(s, "is faster" if best is not None else "has speed", str(s.speed)) for s in open_]
    advice += [_failed(s) for s in judged if s.verdict == "fail"]
    advice += _losses(judged, best, "fastest")
    return (best.name if best is not None else None), advice + broken


def _advise_by_size(rows: pd.DataFrame, judged: Sequence[Standing]) -> tuple[str | None, list[str]]:
    """As `advise`, for variants that were not timed."""
    if not judged:
        return None, ["No variant could be measured: there is nothing to recommend."]
    of_size = rows[rows["metric"] == "size"]
    sizes = dict(zip(of_size["subject"], of_size["value"], strict=True))
    ordered = sorted(judged, key=lambda s: sizes.get(s.name, float("inf")))
    passing = [s for s in ordered if s.verdict == "pass"]
    best = passing[0] if passing else None
    told = {s.name: f"{sizes[s.name]:.3g} MB" if s.name in sizes else "of unknown size" for s in ordered}
    first = _none_passes(ordered) if best is None else _ship(best, len(passing), "smallest", told[best.name])
    smaller = ordered[: ordered.index(best)] if best is not None else ordered
    lead = "is smaller" if best is not None else "has a size"
    advice = [first, *(_undecided(s, lead, told[s.name]) for s in smaller if s.verdict == "undecided")]
    advice += [_failed(s) for s in ordered if s.verdict == "fail"]
    advice += [*_losses(ordered, best, "smallest"), "No speed was measured."]
    return (best.name if best is not None else None), advice


def margin(gates: Iterable[GateScore]) -> tuple[float | None, str | None]:
    """(least distance of a score from its threshold in percentage points, gate); without thresholds (mean
    score, None)."""
    gates = list(gates)
    distances = {g.gate: 100 * (g.score - g.threshold) for g in gates if g.threshold is not None}
    if distances:
        tightest = min(distances, key=lambda name: distances[name])
        return distances[tightest], tightest
    return (100 * mean(gate.score for gate in gates), None) if gates else (None, None)


def verdict_of(gates: Iterable[GateScore]) -> Verdict | None:
    """The verdict over all gates: fail if one fails, else undecided if one is, else pass; None without
    verdicts."""
    verdicts = {gate.verdict for gate in gates}
    order: tuple[Verdict, ...] = ("fail", "undecided", "pass")
    return next((verdict for verdict in order if verdict in verdicts), None)


def items_to_decide(gate: GateScore) -> int | None:
    """Approximate number of items that would decide at the same score; None if only all of them would."""
    if gate.threshold is None:
        return None
    for items in range(gate.items + 1, gate.items_in_all):
        low, high = wilson(gate.score, items)
        if verdict(gate.score, low, high, gate.threshold, complete=False) != "undecided":
            return items
    return None


def _alone(rows: pd.DataFrame, name: str, speed: Ratio | None, error: str | None) -> Standing:
    gates = gate_scores(rows[rows["subject"] == name]) if error is None else []
    quality, tightest = margin(gates)
    return Standing(name, gates, speed, quality, tightest, verdict_of(gates), front=False, error=error)


def _speeds(rows: pd.DataFrame, names: Sequence[str], manifest: Manifest) -> tuple[dict[str, Ratio], str]:
    """(speed of each variant relative to the baseline, the baseline in words)."""
    wanted: str | Mapping[str, float] = manifest.settings.get("baseline", FIRST)
    if isinstance(wanted, str):
        reference = wanted if wanted in names else next(iter(names), "")
    else:  # milliseconds by category: compared with a fictitious variant that has these medians
        told = ", ".join(f"{name} {ms:,.0f} ms" for name, ms in wanted.items())
        reference = f"given medians: {told}"
        timed = rows[(rows["metric"] == LATENCY) & rows["cell"].isin(list(wanted))]
        given = timed.assign(subject=reference, value=timed["cell"].map(wanted))
        rows = pd.concat([timed, given])
    found = {name: times_as_good(rows, name, reference, LATENCY) for name in names}
    return {name: ratio for name, ratio in found.items() if ratio is not None}, reference


def _speed(standing: Standing) -> float:
    return standing.speed.value if standing.speed is not None else 0.0


def _none_passes(judged: Sequence[Standing]) -> str:
    if any(s.verdict == "undecided" for s in judged):
        return (
            "No variant is known to pass every gate: at this sample size the best are undecided. "
            "Ask more items (--limit)."
        )
    nearest = max(judged, key=lambda s: s.quality if s.quality is not None else -100.0)
    return (
        f"No variant passes every gate. {nearest.name} comes nearest: it lacks "
        f"{-(nearest.quality or 0.0):.1f} points at {nearest.tightest}."
    )


def _ship(best: Standing, passing: int, first: str, figure: str) -> str:
    """The recommendation of a variant. ``first``: why it, such as "the fastest"; ``figure``: the evidence."""
    tightest = next(gate for gate in best.gates if gate.gate == best.tightest)
    sampled = tightest.low is not None and tightest.items < tightest.items_in_all
    low = f" (95% interval from {100 * (tightest.low or 0.0):.1f}%)" if sampled else ""
    among = "the only one that passes" if passing == 1 else f"the {first} of the {passing} that pass"
    return (
        f"Ship {best.name}: {among} every gate, {figure}. Its margin is "
        f"{best.quality:+.1f} points at the tightest gate, {best.tightest}: {100 * tightest.score:.1f}%{low} "
        f"against {100 * (tightest.threshold or 0.0):.1f}%."
    )


def _alike(rows: pd.DataFrame, best: Standing, other: Standing) -> str | None:
    """A sentence about a variant whose speed does not differ significantly from the fastest one's; None if it
    does."""
    ratio = times_as_good(rows, other.name, best.name, LATENCY)
    if ratio is None or ratio.significant:
        return None
    too = " passes too, and" if best.verdict == "pass" else ":"
    if ratio.low is None:
        rounds = "one round is" if ratio.rounds == 1 else f"{ratio.rounds} rounds are"
        why, times = f"{rounds} too few to tell", f"{ratio.value:.2f}x"
    else:
        why, times = f"{ratio.rounds} rounds do not tell", str(ratio)
    quality = f"; its margin is {other.quality:+.1f} points" if other.verdict is not None else ""
    return f"{other.name}{too} {why} its speed from {best.name}'s ({times} of it){quality}."


def _losses(judged: Sequence[Standing], best: Standing | None, first: str) -> list[str]:
    """Sentences about variants that lose significantly against full precision, and about the recommended one
    among them. ``first``: as in `_ship`."""
    compared = [(standing, standing.paired) for standing in judged]
    worse = [f"{standing.name} ({paired})" for standing, paired in compared if paired and paired.worse]
    alike = [standing for standing, paired in compared if paired and not paired.worse]
    found = [f"Worse than full precision, item by item: {', '.join(worse)}."] if worse else []
    if alike:
        told = ", ".join(f"{standing.name} ({standing.paired})" for standing in alike)
        found.append(f"Not shown to be worse than full precision: {told}.")
        if best is not None and best not in alike:
            found.append(f"Where no loss may show, ship {alike[0].name}: the {first} of these.")
    return found


def _undecided(standing: Standing, lead: str, figure: str) -> str:
    gates = [gate for gate in standing.gates if gate.verdict == "undecided"]
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
    return f"{standing.name} {lead} ({figure}) but undecided at this sample size: {'; '.join(parts)}."


def _failed(standing: Standing) -> str:
    gates = [gate for gate in standing.gates if gate.verdict == "fail"]
    parts = [f"{g.gate} ({100 * g.score:.1f}% against {100 * (g.threshold or 0.0):.1f}%)" for g in gates]
    return f"{standing.name} fails {', '.join(parts)}."
