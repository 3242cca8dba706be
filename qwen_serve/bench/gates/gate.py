"""Quality gates: lm-eval tasks, a metric, settings of requests, and a threshold."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Verdict = Literal["pass", "fail", "undecided"]


@dataclass(frozen=True, slots=True)
class Gate:
    """A benchmark with its settings, as the competition runs it.

    ``metric``: lm-eval's ``name,filter``. The score is the mean over ``tasks`` of each task's mean; every
    outcome of an item (IFEval's instructions) counts. ``max_tokens`` None: the task's limit. ``thinking``
    None: the server's default. ``baseline``: the published score of the unquantized model.
    """

    name: str
    tasks: tuple[str, ...]
    metric: str
    thinking: bool | None
    max_tokens: int | None
    threshold: float | None = None
    baseline: float | None = None

    @property
    def streamed(self) -> bool:
        """Whether requests are streamed. With thinking they are, because proxies and clients may close a
        connection that is silent for long."""
        return self.thinking is True

    def against(self, baseline: float, share: float) -> "Gate":
        """The same gate with a measured baseline, and a threshold at ``share`` of it."""
        return replace(self, baseline=baseline, threshold=share * baseline)


MMLU_PRO_SUBJECTS = (
    "biology",
    "business",
    "chemistry",
    "computer_science",
    "economics",
    "engineering",
    "health",
    "history",
    "law",
    "math",
    "other",
    "philosophy",
    "physics",
    "psychology",
)

# Thresholds and baselines are the competition's, for Qwen3.5-4B in BF16; gsm8k is the hackathon's check.
OFFICIAL = (
    Gate(
        name="mmlu_pro",
        tasks=tuple(f"mmlu_pro_{subject}" for subject in MMLU_PRO_SUBJECTS),
        metric="exact_match,custom-extract",
        thinking=False,
        max_tokens=512,
        threshold=0.621,
        baseline=0.690,
    ),
    Gate(
        name="ifeval",
        tasks=("ifeval",),
        metric="inst_level_strict_acc,none",
        thinking=False,
        max_tokens=512,
        threshold=0.814,
        baseline=0.857,
    ),
    Gate(
        name="gpqa_diamond",
        tasks=("gpqa_diamond_cot_zeroshot",),
        metric="exact_match,flexible-extract",
        thinking=True,
        max_tokens=12_288,
        threshold=0.630,
        baseline=0.700,
    ),
    Gate(
        name="gsm8k",
        tasks=("gsm8k_cot",),
        metric="exact_match,flexible-extract",
        thinking=False,
        max_tokens=1_024,
        threshold=0.875,
    ),
)

# Gates like the first three, on the bundled model's held-out items.
NANO_NAMES = ("nano_knowledge", "nano_instructions", "nano_reasoning")
# Questions about pictures, for a server with a vision tower; runs only if --tasks names it.
NANO_PICTURES = "nano_pictures"
NANO_FOLDER = Path(__file__).resolve().parents[3] / "models" / "nano"


def verdict(score: float, low: float, high: float, threshold: float, *, complete: bool) -> Verdict:
    """Pass or fail if the 95% interval is on one side of the threshold, else undecided.

    ``complete``: every item of the benchmark was asked, so the score itself decides.
    """
    if complete:
        return "pass" if score >= threshold else "fail"
    if low >= threshold:
        return "pass"
    return "fail" if high < threshold else "undecided"
