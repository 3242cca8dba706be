"""What a sweep leaves behind: one file a variant, and one about them all."""

from typing import Literal

from pydantic import Field

from bench.gates.gate import Verdict
from bench.gates.result import GateScore
from bench.latency_result import Baseline, Summary
from bench.results import Record, ResultFile
from bench.variants.variant import Variant

Values = dict[str, int | float | bool | str | None]


class Weights(Record):
    """The GGUF. ``bits``: of tensor data per weight; divergence from the whole model in nats a token, None
    where the converter measured none."""

    file: str
    bytes: int
    sha256: str
    bits: float
    divergence: float | None
    divergence_p99: float | None
    same_top: float | None
    divergence_tokens: int | None


class LatencyPart(Record):
    """Of the variant's latency result: how it was measured, and a line for each category and protocol."""

    endpoint: str
    prompts: str
    settings: Values
    summaries: list[Summary]


class VariantResult(ResultFile):
    """One variant. After a failure ``error`` says why, and what came after it is missing.

    ``fingerprint``: of the weights, the server's settings and the measurement's; another one is measured
    anew. ``raw``: the folder with the measurements' own files and the server's log. ``stage_seconds``: wall
    time by stage, of the run that finished it.
    """

    kind: Literal["variant"] = "variant"
    variant: Variant
    source: str
    fingerprint: str
    error: str | None = None
    weights: Weights | None = None
    latency: LatencyPart | None = None
    quality_settings: Values = Field(default_factory=dict)
    gates: list[GateScore] = Field(default_factory=list)
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    raw: str = ""


class Standing(Record):
    """Where a variant stands among the others.

    ``speed``: the mean of baseline / median over its categories and protocols. ``quality``: the score's
    distance from the threshold, in points of 100, at the gate where it is least (``tightest``); without any
    threshold the mean score. ``verdict``: pass if every gate passes, fail if one fails. ``front``: no other
    variant is at least as good in both and better in one.
    """

    name: str
    speed: float | None
    quality: float | None
    tightest: str | None
    verdict: Verdict | None
    front: bool
    error: str | None


class SweepResult(ResultFile):
    """The result file of ``bench.sweep``. ``advice``: which variant to ship and why, a sentence each."""

    kind: Literal["sweep"] = "sweep"
    source: str
    baseline: Baseline | None
    settings: Values
    standings: list[Standing]
    recommended: str | None
    advice: list[str]
