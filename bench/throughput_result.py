"""What a throughput measurement is made of: every request, the figures of each level, the score."""

from collections.abc import Sequence
from typing import Literal

from bench.measures import Spread, Tokens, cached_share, is_miscounted
from bench.results import Record, ResultFile

# The hackathon's concurrency levels and their weights in the score.
WEIGHTS = {1: 1, 2: 1, 4: 2, 8: 2, 16: 4, 32: 4, 64: 8}
PROTOCOL_TOKENS = 1024
PROTOCOL_REQUESTS = 64


class Request(Tokens):
    """One request. ``started``: seconds since its level began; ``turn``: 0-based turn of its conversation.

    ``longest_gap``: the longest wait between two pieces of its text, in seconds.
    """

    level: int
    turn: int
    started: float
    seconds: float
    first_token_seconds: float | None = None
    seconds_per_token: float | None = None
    longest_gap: float | None = None
    error: str | None = None

    @property
    def verified_tokens(self) -> int:
        """What counts: the smaller of the claim and the re-count, so that neither can inflate the figure."""
        counts = [count for count in (self.completion_tokens, self.recounted_tokens) if count is not None]
        return min(counts) if counts and self.error is None else 0


class SpotCheck(Record):
    """A sum asked for while the level runs, to see that the answers are still answers."""

    level: int
    question: str
    expected: str
    answer: str
    passed: bool


class Level(Record):
    """One concurrency level. Rates are tokens per second of wall time, times are seconds, shares lie in 0..1.

    ``output_rate`` counts verified output tokens, ``total_rate`` adds the prompts'.
    """

    concurrency: int
    requests: int
    errors: int
    seconds: float
    output_rate: float
    total_rate: float
    claimed_output_tokens: int
    verified_output_tokens: int
    latency: Spread
    first_token: Spread | None
    per_token: Spread | None
    longest_gap: float | None
    cached_share: float | None
    miscounted: int
    stopped_early: int
    spot_checks: int
    spot_checks_passed: int


class Turn(Record):
    """One turn of the conversations at one level."""

    concurrency: int
    turn: int
    prompt_tokens: float
    cached_share: float | None
    first_token: Spread | None
    latency: Spread


class Score(Record):
    """The weighted sum of verified output token rates; ``protocol``: all of the hackathon's rules held."""

    value: float
    protocol: bool
    deviations: list[str]


class ThroughputResult(ResultFile):
    """The result file of ``bench.throughput``."""

    kind: Literal["throughput"] = "throughput"
    workload: str
    endpoint: str
    token_counts: str
    settings: dict[str, int | bool | str]
    levels: list[Level]
    turns: list[Turn]
    score: Score | None
    spot_checks: list[SpotCheck]
    requests: list[Request]


def summarize_level(requests: Sequence[Request], checks: Sequence[SpotCheck], max_tokens: int) -> Level:
    """The figures of one level; at least one request must have succeeded."""
    good = [request for request in requests if request.error is None]
    wall = max(r.started + r.seconds for r in requests) - min(r.started for r in requests)
    verified = sum(request.verified_tokens for request in good)
    prompts = sum(request.prompt_tokens or 0 for request in good)
    gaps = [request.longest_gap for request in good if request.longest_gap is not None]
    return Level(
        concurrency=requests[0].level,
        requests=len(requests),
        errors=len(requests) - len(good),
        seconds=wall,
        output_rate=verified / wall,
        total_rate=(verified + prompts) / wall,
        claimed_output_tokens=sum(request.completion_tokens or 0 for request in good),
        verified_output_tokens=verified,
        latency=_spread([request.seconds for request in good]),
        first_token=Spread.of(request.first_token_seconds for request in good),
        per_token=Spread.of(request.seconds_per_token for request in good),
        longest_gap=max(gaps, default=None),
        cached_share=cached_share([(r.prompt_tokens, r.cached_tokens) for r in good]),
        miscounted=sum(is_miscounted(r.completion_tokens, r.recounted_tokens) for r in good),
        stopped_early=sum((request.completion_tokens or 0) < max_tokens for request in good),
        spot_checks=len(checks),
        spot_checks_passed=sum(check.passed for check in checks),
    )


def summarize_turns(requests: Sequence[Request]) -> list[Turn]:
    """By level and turn, of the requests that succeeded."""
    good = [request for request in requests if request.error is None]
    keys = sorted({(request.level, request.turn) for request in good})
    groups = [(key, [r for r in good if (r.level, r.turn) == key]) for key in keys]
    return [
        Turn(
            concurrency=level,
            turn=turn,
            prompt_tokens=sum(r.prompt_tokens or 0 for r in group) / len(group),
            cached_share=cached_share([(r.prompt_tokens, r.cached_tokens) for r in group]),
            first_token=Spread.of(r.first_token_seconds for r in group),
            latency=_spread([r.seconds for r in group]),
        )
        for (level, turn), group in groups
    ]


def score(levels: Sequence[Level], *, input_tokens: int, output_tokens: int, recounted: bool) -> Score | None:
    """The hackathon's score over the levels that have a weight; None when none has."""
    weighted = [level for level in levels if level.concurrency in WEIGHTS]
    if not weighted:
        return None
    deviations = []
    missing = sorted(set(WEIGHTS) - {level.concurrency for level in weighted})
    if missing:
        deviations.append(f"levels {', '.join(map(str, missing))} were not run")
    if (input_tokens, output_tokens) != (PROTOCOL_TOKENS, PROTOCOL_TOKENS):
        deviations.append(f"{input_tokens:,} / {output_tokens:,} tokens instead of 1,024 / 1,024")
    if any(level.requests != PROTOCOL_REQUESTS for level in weighted):
        deviations.append(f"other than {PROTOCOL_REQUESTS} requests a level")
    if any(level.errors for level in weighted):
        deviations.append("requests failed")
    if any(not level.spot_checks or level.spot_checks_passed < level.spot_checks for level in weighted):
        deviations.append("spot checks failed or were left out")
    if not recounted:
        deviations.append("token counts are the server's own claims")
    if any(is_miscounted(level.claimed_output_tokens, level.verified_output_tokens) for level in weighted):
        deviations.append("re-counted tokens differ from the claimed ones")
    value = sum(WEIGHTS[level.concurrency] * level.output_rate for level in weighted)
    return Score(value=value, protocol=not deviations, deviations=deviations)


def _spread(values: Sequence[float]) -> Spread:
    spread = Spread.of(values)
    assert spread is not None, "no request succeeded"
    return spread
