"""What a comparison of peers is made of: who took part, what each measured, and the ratios."""

from collections.abc import Sequence
from operator import truediv
from pathlib import Path
from statistics import mean, median
from typing import Literal

from pydantic import Field

from bench.ceiling import Ceiling
from bench.errors import BenchError
from bench.latency_result import (
    CATEGORIES,
    PROTOCOLS,
    Baseline,
    Protocol,
    Run,
    Summary,
    by_key,
    read_baseline,
)
from bench.results import Record, ResultFile
from bench.throughput_result import Level, Request

MEAN = "mean"
LEAST_REQUESTS = 4

LEAST_ROUNDS = 3
"""From which on the ratios of rounds have a median worth telling."""

Settings = dict[str, int | bool | str]


class PeerRecord(Record):
    """A competitor: ``start_seconds`` until it answered, ``failed`` why it is missing from (some) figures."""

    name: str
    program: str
    command: list[str]
    url: str
    log: str | None
    start_seconds: float | None = None
    about: dict[str, str] = Field(default_factory=dict)
    failed: str | None = None


class Measured(Record):
    """One peer's raw figures. ``same_answers``: of each kind of request, how many answers equal the
    reference's, and of how many; greedy answers of one model differ only by rounding, or by a mistake."""

    peer: str
    summaries: list[Summary] = Field(default_factory=list)
    runs: list[Run] = Field(default_factory=list)
    levels: list[Level] = Field(default_factory=list)
    requests: list[Request] = Field(default_factory=list)
    same_answers: dict[str, tuple[int, int]] = Field(default_factory=dict)
    counters: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="of our server: what its own counters grew by in each part, warm-ups included",
    )


class Figure(Record):
    """One number to compare: a median latency in ms, or output tok/s.

    ``ratio``: times as fast as the reference, whichever way the unit counts; ``round_ratio``: the median of
    the same within each round, for what disturbs a machine lasts. ``ceiling``: the same quantity of the bare
    engine, ``ceiling_share``: how much of its speed is reached (above 1: it works less).
    """

    peer: str
    what: str
    unit: Literal["ms", "tok/s"]
    value: float
    ratio: float | None = None
    round_ratio: float | None = None
    ceiling: float | None = None
    ceiling_share: float | None = None


class PeersResult(ResultFile):
    """The result file of ``bench.peers``. ``resident``: all servers ran at once, one of them working."""

    kind: Literal["peers"] = "peers"
    workload: str
    gguf: str | None
    gguf_bytes: int | None
    reference: str
    resident: bool
    settings: Settings
    baseline: Baseline | None = None
    peers: list[PeerRecord]
    ceiling: Ceiling | None = None
    figures: list[Figure] = Field(default_factory=list)
    measured: list[Measured] = Field(default_factory=list)


def read_any_baseline(text: str) -> Baseline | None:
    """As latency's --baseline; a result file of this command stands for its reference peer's medians."""
    if text in {"none", "official"} or "=" in text:
        return read_baseline(text)
    try:
        result = PeersResult.load(Path(text))
    except BenchError:
        return read_baseline(text)
    found: dict[Protocol, dict[str, float]] = {protocol: {} for protocol in PROTOCOLS}
    for measured in result.measured:
        for line in measured.summaries if measured.peer == result.reference else []:
            if line.latency is not None:
                found[line.protocol][line.category] = line.latency.p50
    return Baseline(name=f"{result.reference} in {text}", seconds=found)


def latency_figures(measured: Sequence[Measured], ceiling: Ceiling | None) -> list[Figure]:
    """Medians in ms by category and protocol, and their mean over the categories where all were run."""
    figures: list[Figure] = []
    for one in measured:
        for protocol in PROTOCOLS:
            medians: list[float] = []
            ceilings: list[float | None] = []
            for name, category in CATEGORIES.items():
                line = by_key(one.summaries).get((name, protocol))
                if line is None or line.latency is None:
                    continue
                best = ceiling.batch(category.prompt_tokens, category.max_tokens, 1) if ceiling else None
                medians.append(1000 * line.latency.p50)
                ceilings.append(1000 * best.seconds if best else None)
                figures.append(_time(one.peer, f"{name}, {protocol}", medians[-1], ceilings[-1]))
            if len(medians) == len(CATEGORIES):
                known = [value for value in ceilings if value is not None]
                best_mean = mean(known) if len(known) == len(medians) else None
                figures.append(_time(one.peer, f"{MEAN}, {protocol}", mean(medians), best_mean))
    return figures


def throughput_figures(
    measured: Sequence[Measured],
    workload: str,
    settings: dict[str, int | bool | str],
    ceiling: Ceiling | None,
    reference: str,
) -> list[Figure]:
    """Output tok/s by level, of several rounds the median."""
    figures = []
    against = next((one for one in measured if one.peer == reference), None)
    for one in measured:
        for level in dict.fromkeys(level.concurrency for level in one.levels):
            rates = _rates(one, level)
            rate, theirs = median(rates), _rates(against, level) if against else []
            paired = len(rates) == len(theirs) >= LEAST_ROUNDS and all(theirs)
            best = level_ceiling(workload, level, settings, ceiling) if ceiling else None
            figures.append(
                Figure(
                    peer=one.peer,
                    what=at_once(workload, level),
                    unit="tok/s",
                    value=rate,
                    round_ratio=median(map(truediv, rates, theirs)) if paired else None,
                    ceiling=best,
                    ceiling_share=rate / best if best else None,
                )
            )
    return figures


def _rates(one: Measured, level: int) -> list[float]:
    return [found.output_rate for found in one.levels if found.concurrency == level]


def at_once(workload: str, level: int) -> str:
    """How a level is called in figures and tables."""
    return f"{workload}, {level} at once"


def level_ceiling(workload: str, level: int, settings: Settings, ceiling: Ceiling) -> float | None:
    """Output tok/s of the bare engine; None for conversations.

    With shared prefixes: each prefix read once, then rounds of full batches of questions, decoded as if they
    had no prefix before them, so it can not quite be reached.
    """
    question, answer = int(settings["input_tokens"]), int(settings["output_tokens"])
    batch = ceiling.batch(question, answer, level)
    if batch is None or workload == "chat":
        return None
    if workload == "random":
        return batch.output_rate
    requests = requests_at(level, int(settings["requests"]), int(settings["waves"]))
    subjects = int(settings["subjects"])
    rate = ceiling.prefill_rate(int(settings["prefix_tokens"]))
    if rate is None:
        return None
    prefixes = min(subjects, requests) * int(settings["prefix_tokens"]) / rate
    return requests * answer / (prefixes + requests / level * batch.seconds)


def requests_at(level: int, requests: int, waves: int) -> int:
    """How many requests a level gets: ``waves`` for each worker where that is said, else ``requests``."""
    return max(LEAST_REQUESTS, waves * level) if waves else requests


def with_ratios(figures: Sequence[Figure], reference: str) -> list[Figure]:
    """The figures with each one's ratio to the reference's of the same name; None where that is missing."""
    base = {figure.what: figure.value for figure in figures if figure.peer == reference}
    made = []
    for figure in figures:
        against = base.get(figure.what)
        if against:
            ratio = against / figure.value if figure.unit == "ms" else figure.value / against
            figure = figure.model_copy(update={"ratio": ratio})
        made.append(figure)
    return made


def _time(peer: str, what: str, value: float, ceiling: float | None) -> Figure:
    share = ceiling / value if ceiling is not None else None
    return Figure(peer=peer, what=what, unit="ms", value=value, ceiling=ceiling, ceiling_share=share)
