"""All metrics that a run can record: unit, which direction is better, and meaning.

Requests' metrics have the usual names. ITL is the mean time of each token after the first (vLLM's TPOT), so
that chunks of several tokens, as with speculation, do not distort it.
"""

from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Metric:
    """``better`` None: the quantity is descriptive, neither good nor bad."""

    unit: str
    better: Better | None
    title: str


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
    "failed": Metric("requests", "lower", "failed requests"),
    "good": Metric("requests", "higher", "requests within the limits of --goodput"),
    # --- of a cell
    "seconds": Metric("s", None, "wall time"),
    "output_rate": Metric("tok/s", "higher", "verified output tokens a second"),
    "total_rate": Metric("tok/s", "higher", "prompt and output tokens a second"),
    "request_rate": Metric("req/s", "higher", "finished requests a second"),
    "goodput": Metric("req/s", "higher", "requests a second within the limits of --goodput"),
    "spot_checks_failed": Metric("answers", "lower", "sums answered wrongly"),
    "refused": Metric("requests", None, "requests answered with 429"),
    # --- of a comparison of servers
    "ms_per_token": Metric("ms", "lower", "request latency by output tokens"),
    "same_answers": Metric("answers", None, "answers equal to the reference's"),
    "compared_answers": Metric("answers", None, "prompts that both answered"),
    "start_time": Metric("s", "lower", "time of a start, or of a stage of it"),
    # --- of our server's counters
    "steps": Metric("steps", None, "steps of the engine"),
    "step_tokens": Metric("tokens", None, "tokens in their batches"),
    "device_time": Metric("ms", None, "in llama_decode, and waiting for it"),
    "draft_time": Metric("ms", None, "making drafts, the drafters' passes among it"),
    "host_time": Metric("ms", None, "the host's own part of steps"),
    "overlapped_time": Metric("ms", None, "host work while a GPU computes"),
    "verifications": Metric("drafts", None, "drafts verified"),
    "drafted_tokens": Metric("tokens", None, "tokens drafted"),
    "accepted_tokens": Metric("tokens", None, "draft tokens accepted"),
    "drafts_failed": Metric("drafts", "lower", "drafts lost to an error"),
    "drafts_unready": Metric("drafts", None, "drafts wanted before the drafter was ready"),
    # --- of a soak
    "resident_memory": Metric("MiB", "lower", "resident memory of the server"),
    "aborted": Metric("requests", None, "streams given up by the client"),
    # --- of the engine without a server
    # --- of a type of the KV cache
    "kv_bytes": Metric("bytes", "lower", "keys and values of a token, all layers"),
    "retrieved": Metric("%", "higher", "tokens of random numbers foreseen when they come again"),
    # --- of single passes of the engine, for a batch of sequences
    "step_time": Metric("ms", "lower", "time of a step"),
    # --- of a quality gate, or one of its subtasks
    "score": Metric("%", "higher", "score"),
    "score_low": Metric("%", None, "lower end of the score's 95% interval"),
    "score_high": Metric("%", None, "upper end of the score's 95% interval"),
    "threshold": Metric("%", None, "score that the gate asks for"),
    "baseline": Metric("%", None, "published score of the unquantized model"),
    "reference_score": Metric("%", None, "score of the model in full precision, same items"),
    "lost_items": Metric("items", "lower", "items that full precision alone gets right"),
    "gained_items": Metric("items", None, "items that full precision alone gets wrong"),
    "items": Metric("items", None, "items asked"),
    "items_in_all": Metric("items", None, "items of the benchmark"),
    "cut_answers": Metric("answers", "lower", "answers that ran into the token limit"),
    "cut_thinking": Metric("answers", "lower", "answers that were still thinking then"),
    "empty_answers": Metric("answers", "lower", "replies without an answer"),
    "retries": Metric("requests", "lower", "requests that had to be sent again"),
    # --- of weights: a GGUF, and its distance from its reference (the cell says at which positions)
    "size": Metric("MB", "lower", "size of the GGUF"),
    "bits_per_weight": Metric("bits", "lower", "bits per weight"),
    "scored_tokens": Metric("tokens", None, "positions compared"),
    "perplexity": Metric("", "lower", "perplexity"),
    "reference_perplexity": Metric("", None, "perplexity of the reference"),
    "log_ratio": Metric("nats", "lower", "ln(perplexity / the reference's)"),
    "kld_mean": Metric("nats", "lower", "KL divergence, mean"),
    "kld_median": Metric("nats", "lower", "KL divergence, median"),
    "kld_p90": Metric("nats", "lower", "KL divergence, 90th percentile"),
    "kld_p99": Metric("nats", "lower", "KL divergence, 99th percentile"),
    "kld_p999": Metric("nats", "lower", "KL divergence, 99.9th percentile"),
    "kld_max": Metric("nats", "lower", "KL divergence, maximum"),
    "same_top": Metric("%", "higher", "positions where both rate the same token highest"),
    "dropped": Metric("%", "lower", "the reference's probability for tokens the model lacks"),
    "perplexity_error": Metric("", None, "standard error, from the spread between chunks"),
    "reference_perplexity_error": Metric("", None, "standard error, between chunks"),
    "log_ratio_error": Metric("nats", None, "standard error, between chunks"),
    "kld_mean_error": Metric("nats", None, "standard error, between chunks"),
    "same_top_error": Metric("%", None, "standard error, between chunks"),
    # --- of a conformance check
    "passed": Metric("checks", "higher", "the server keeps the rule"),
    "skipped": Metric("checks", None, "the rule cannot be checked there"),
}
