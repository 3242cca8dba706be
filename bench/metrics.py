"""Every quantity that is recorded, by name: its unit, which way is better, and what it is.

A row of the store names one of these; what is not here cannot be recorded. The names of requests' quantities
are those of the field: TTFT, ITL as the mean time of a token after the first (vLLM's TPOT; a chunk that
brings several tokens, as speculation makes them, does not distort it).
"""

from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Metric:
    """``better`` None: it describes, and is neither good nor bad. ``per_cell``: one value for a whole cell
    and round; else one for each request."""

    unit: str
    better: Better | None
    title: str
    per_cell: bool = False


METRICS: dict[str, Metric] = {
    # --- of a request
    "latency": Metric("ms", "lower", "request latency"),
    "ttft": Metric("ms", "lower", "time to first token"),
    "itl": Metric("ms", "lower", "inter-token latency, mean of a request"),
    "longest_gap": Metric("ms", "lower", "longest wait between two chunks"),
    "chunks": Metric("chunks", None, "streamed chunks"),
    "lateness": Metric("ms", None, "how much later than planned the client sent it"),
    "prompt_tokens": Metric("tokens", None, "prompt tokens, as the server counts"),
    "cached_tokens": Metric("tokens", None, "prompt tokens from a cache"),
    "claimed_tokens": Metric("tokens", None, "completion tokens, as the server counts"),
    "recounted_tokens": Metric("tokens", None, "completion tokens, as the tokenizer counts"),
    "verified_tokens": Metric("tokens", None, "the smaller of both counts"),
    "turn": Metric("", None, "turn of its conversation, from 1"),
    "failed": Metric("requests", "lower", "failed requests"),
    "good": Metric("requests", "higher", "requests within the limits of --goodput"),
    # --- of a cell
    "seconds": Metric("s", None, "wall time", per_cell=True),
    "output_rate": Metric("tok/s", "higher", "verified output tokens a second", per_cell=True),
    "total_rate": Metric("tok/s", "higher", "prompt and output tokens a second", per_cell=True),
    "request_rate": Metric("req/s", "higher", "finished requests a second", per_cell=True),
    "goodput": Metric("req/s", "higher", "requests a second within the limits of --goodput", per_cell=True),
    "spot_checks_failed": Metric("answers", "lower", "sums answered wrongly", per_cell=True),
    # --- of a quality gate, or a subtask of one
    "score": Metric("%", "higher", "score", per_cell=True),
    "score_low": Metric("%", None, "lower end of the score's 95% interval", per_cell=True),
    "score_high": Metric("%", None, "upper end of the score's 95% interval", per_cell=True),
    "threshold": Metric("%", None, "score that the gate asks for", per_cell=True),
    "baseline": Metric("%", None, "published score of the unquantized model", per_cell=True),
    "reference_score": Metric("%", None, "score of the model in full precision, same items", per_cell=True),
    "items": Metric("items", None, "items asked", per_cell=True),
    "items_in_all": Metric("items", None, "items of the benchmark", per_cell=True),
    "cut_answers": Metric("answers", "lower", "answers that ran into the token limit", per_cell=True),
    "cut_thinking": Metric("answers", "lower", "answers that were still thinking then", per_cell=True),
    "empty_answers": Metric("answers", "lower", "replies without an answer", per_cell=True),
    "retries": Metric("requests", "lower", "requests that had to be sent again", per_cell=True),
    # --- of weights: a GGUF, and how far it is from its reference (the cell says at which positions)
    "size": Metric("MB", "lower", "size of the GGUF", per_cell=True),
    "bits_per_weight": Metric("bits", "lower", "bits per weight", per_cell=True),
    "scored_tokens": Metric("tokens", None, "positions compared", per_cell=True),
    "perplexity": Metric("", "lower", "perplexity", per_cell=True),
    "reference_perplexity": Metric("", None, "perplexity of the reference", per_cell=True),
    "log_ratio": Metric("nats", "lower", "ln(perplexity / the reference's)", per_cell=True),
    "kld_mean": Metric("nats", "lower", "KL divergence, mean", per_cell=True),
    "kld_median": Metric("nats", "lower", "KL divergence, median", per_cell=True),
    "kld_p90": Metric("nats", "lower", "KL divergence, 90th percentile", per_cell=True),
    "kld_p99": Metric("nats", "lower", "KL divergence, 99th percentile", per_cell=True),
    "kld_p999": Metric("nats", "lower", "KL divergence, 99.9th percentile", per_cell=True),
    "kld_max": Metric("nats", "lower", "KL divergence, maximum", per_cell=True),
    "same_top": Metric("%", "higher", "positions where both rate the same token highest", per_cell=True),
    "dropped": Metric("%", "lower", "the reference's probability for tokens the model lacks", per_cell=True),
    "perplexity_error": Metric("", None, "standard error, from the spread between chunks", per_cell=True),
    "reference_perplexity_error": Metric("", None, "standard error, between chunks", per_cell=True),
    "log_ratio_error": Metric("nats", None, "standard error, between chunks", per_cell=True),
    "kld_mean_error": Metric("nats", None, "standard error, between chunks", per_cell=True),
    "same_top_error": Metric("%", None, "standard error, between chunks", per_cell=True),
    # --- of a conformance check
    "passed": Metric("checks", "higher", "the server keeps the rule", per_cell=True),
    "skipped": Metric("checks", None, "the rule cannot be checked there", per_cell=True),
}
"""Further measurements add theirs here."""
