"""What a latency measurement is made of: the protocol's categories, every run, and what they sum up to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Literal

from pydantic import Field

from bench.errors import BenchError
from bench.measures import Spread, Tokens, cached_share, is_miscounted, median_known
from bench.results import Record, ResultFile

FILLER = "The quick brown fox jumps over the lazy dog. "
FILLER_TOKENS = 10

Protocol = Literal["official", "distinct"]
PROTOCOLS: tuple[Protocol, ...] = ("official", "distinct")


@dataclass(frozen=True, slots=True)
class Category:
    """One line of the protocol: tokens in (nominal) and out, and the published BF16 baseline on an A10G."""

    name: str
    prompt_tokens: int
    max_tokens: int
    official_seconds: float


CATEGORIES = {
    category.name: category
    for category in (
        Category("short", 64, 128, 2.582),
        Category("medium", 2048, 256, 5.441),
        Category("long", 8192, 256, 6.576),
    )
}


class Run(Tokens):
    """One request. ``arrivals``: seconds from sending to each piece of text; empty when not ``streamed``."""

    protocol: Protocol
    category: str
    streamed: bool
    warmup: bool
    seconds: float
    arrivals: list[float] = Field(default_factory=list)
    error: str | None = None


class Summary(Record):
    """One category under one protocol. Times are seconds; token counts are medians; shares lie in 0..1.

    ``latency`` is of the requests answered in one piece. Of the streamed ones: ``first_token``, ``per_token``
    (mean time of a token after the first, one value a request), ``gap`` (between two arrivals).
    """

    protocol: Protocol
    category: str
    runs: int
    errors: int
    latency: Spread | None
    speedup: float | None
    prompt_tokens: float | None
    completion_tokens: float | None
    cached_share: float | None
    miscounted: int
    first_token: Spread | None
    per_token: Spread | None
    gap: Spread | None
    tokens_per_arrival: float | None


class Baseline(Record):
    """Median seconds per category to compare with, for each protocol."""

    name: str
    seconds: dict[Protocol, dict[str, float]]


class LatencyResult(ResultFile):
    """The result file of ``bench.latency``. ``speedup``: the mean over all three categories, per protocol."""

    kind: Literal["latency"] = "latency"
    endpoint: str
    stream_endpoint: str
    prompts: str
    token_counts: str
    baseline: Baseline | None
    settings: dict[str, int | bool | str]
    summaries: list[Summary]
    speedup: dict[Protocol, float | None]
    runs: list[Run]


def read_baseline(text: str) -> Baseline | None:
    """``official``, ``none``, ``short=2582,medium=5441,long=6576`` (ms), or a result file of this command."""
    if text == "none":
        return None
    if text == "official":
        seconds = {name: category.official_seconds for name, category in CATEGORIES.items()}
        return Baseline(
            name="official: BF16 on A10G", seconds={protocol: dict(seconds) for protocol in PROTOCOLS}
        )
    if "=" in text:
        try:
            given = {name: float(ms) / 1000 for name, ms in (part.split("=") for part in text.split(","))}
        except ValueError as error:
            raise BenchError(f"--baseline {text}: want category=milliseconds,...") from error
        unknown = sorted(set(given) - set(CATEGORIES))
        if unknown:
            raise BenchError(
                f"--baseline: unknown category {unknown[0]!r}: want one of {', '.join(CATEGORIES)}"
            )
        return Baseline(name="given", seconds={protocol: dict(given) for protocol in PROTOCOLS})
    measured = LatencyResult.load(Path(text))
    found: dict[Protocol, dict[str, float]] = {protocol: {} for protocol in PROTOCOLS}
    for line in measured.summaries:
        if line.latency is not None:
            found[line.protocol][line.category] = line.latency.p50
    return Baseline(name=text, seconds=found)


def summarize(runs: Sequence[Run], baseline: Baseline | None) -> list[Summary]:
    """One summary for each protocol and category that occurs, warm-ups left out."""
    keys = dict.fromkeys((run.category, run.protocol) for run in runs)
    return [
        _summary(
            [run for run in runs if (run.category, run.protocol) == key and not run.warmup], key, baseline
        )
        for key in keys
    ]


def mean_speedup(summaries: Sequence[Summary]) -> dict[Protocol, float | None]:
    """The score: the mean over all categories; None unless every category has a speed-up."""
    score: dict[Protocol, float | None] = {}
    for protocol in PROTOCOLS:
        speedups = [line.speedup for line in summaries if line.protocol == protocol]
        known = [speedup for speedup in speedups if speedup is not None]
        score[protocol] = mean(known) if len(known) == len(CATEGORIES) else None
    return score


def _summary(runs: Sequence[Run], key: tuple[str, Protocol], baseline: Baseline | None) -> Summary:
    category, protocol = key
    good = [run for run in runs if run.error is None]
    whole = [run for run in good if not run.streamed]
    streamed = [run for run in good if run.streamed and run.arrivals]
    latency = Spread.of([run.seconds for run in whole])
    reference = baseline.seconds[protocol].get(category) if baseline is not None else None
    gaps = [b - a for run in streamed for a, b in zip(run.arrivals, run.arrivals[1:], strict=False)]
    return Summary(
        protocol=protocol,
        category=category,
        runs=len(whole),
        errors=len(runs) - len(good),
        latency=latency,
        speedup=reference / latency.p50 if latency is not None and reference is not None else None,
        prompt_tokens=median_known([run.prompt_tokens for run in whole]),
        completion_tokens=median_known([run.completion_tokens for run in whole]),
        cached_share=cached_share([(run.prompt_tokens, run.cached_tokens) for run in whole]),
        miscounted=sum(is_miscounted(run.completion_tokens, run.recounted_tokens) for run in good),
        first_token=Spread.of([run.arrivals[0] for run in streamed]),
        per_token=Spread.of(_seconds_per_token(streamed)),
        gap=Spread.of(gaps),
        tokens_per_arrival=median_known(
            [run.completion_tokens / len(run.arrivals) for run in streamed if run.completion_tokens]
        ),
    )


def _seconds_per_token(runs: Sequence[Run]) -> list[float]:
    return [
        (run.arrivals[-1] - run.arrivals[0]) / (run.completion_tokens - 1)
        for run in runs
        if len(run.arrivals) > 1 and run.completion_tokens is not None and run.completion_tokens > 1
    ]


def by_key(summaries: Sequence[Summary]) -> Mapping[tuple[str, Protocol], Summary]:
    """The summaries by (category, protocol)."""
    return {(line.category, line.protocol): line for line in summaries}
