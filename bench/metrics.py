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
    # --- of servers compared
    "ms_per_token": Metric("ms", "lower", "request latency by output tokens"),
    "same_answers": Metric("answers", None, "answers equal to the reference's", per_cell=True),
    "compared_answers": Metric("answers", None, "prompts that both answered", per_cell=True),
    "prefill_seconds": Metric("s", "lower", "llama.cpp alone reads the prompts", per_cell=True),
    "decode_seconds": Metric("s", "lower", "llama.cpp alone decodes the answers", per_cell=True),
    # --- of our server's counters
    "steps": Metric("steps", None, "steps of the engine", per_cell=True),
    "step_tokens": Metric("tokens", None, "tokens in their batches", per_cell=True),
    "device_time": Metric("ms", None, "in llama_decode, and waiting for it", per_cell=True),
    "host_time": Metric("ms", None, "the host's own part of steps", per_cell=True),
    "overlapped_time": Metric("ms", None, "host work while a GPU computes", per_cell=True),
    "verifications": Metric("drafts", None, "drafts verified", per_cell=True),
    "drafted_tokens": Metric("tokens", None, "tokens drafted", per_cell=True),
    "accepted_tokens": Metric("tokens", None, "draft tokens accepted", per_cell=True),
    "drafts_failed": Metric("drafts", "lower", "drafts lost to an error", per_cell=True),
    "drafts_unready": Metric("drafts", None, "drafts wanted before the drafter was ready", per_cell=True),
    "sampler_changes": Metric("changes", None, "device samplers changed for a request", per_cell=True),
    "prefix_failed_copies": Metric(
        "copies", "lower", "checkpoints not taken for want of memory", per_cell=True
    ),
    # --- of the client itself
    "delay": Metric("ms", "lower", "from the server's sending to the client's stamp"),
    "chunk_rate": Metric("chunks/s", None, "chunks a second", per_cell=True),
    "client_load": Metric("cores", "lower", "CPU time by wall time", per_cell=True),
    # --- of a soak
    "resident_memory": Metric("MiB", "lower", "resident memory of the server", per_cell=True),
    "aborted": Metric("requests", None, "streams given up by the client", per_cell=True),
    # --- of the engine without a server
    "copy_time": Metric("ms", "lower", "copying, saving or restoring a sequence"),
    "copy_size": Metric("MiB", None, "a saved sequence", per_cell=True),
    # --- of a conversion
    "conversion_time": Metric("s", "lower", "time of a conversion", per_cell=True),
    "cpu_time": Metric("s", "lower", "processor time", per_cell=True),
    "peak_rss": Metric("GB", "lower", "peak memory", per_cell=True),
    "peak_anonymous": Metric("GB", "lower", "peak memory that no file backs", per_cell=True),
    "written": Metric("GB", None, "file written", per_cell=True),
    # --- of a type of the KV cache
    "kv_bytes": Metric("bytes", "lower", "keys and values of a token, all layers", per_cell=True),
    "retrieved": Metric(
        "%", "higher", "tokens of random numbers foreseen when they come again", per_cell=True
    ),
    # --- of passes of the engine alone, of a batch of sequences
    "prefill_time": Metric("ms", "lower", "time to read a prompt", per_cell=True),
    "step_time": Metric("ms", "lower", "time of a step", per_cell=True),
    "step_bytes": Metric("GB", "lower", "bytes a decode step moves, by the tensors", per_cell=True),
    # --- of the roofline: computed, never measured
    "predicted_latency": Metric("ms", "lower", "latency, an estimate by the roofline model", per_cell=True),
    "least_latency": Metric("ms", "lower", "latency by the datasheet: nothing can be below", per_cell=True),
    "predicted_memory": Metric("ms", None, "of the estimate, bytes being moved", per_cell=True),
    "predicted_compute": Metric("ms", None, "of the estimate, arithmetic", per_cell=True),
    "predicted_launches": Metric("ms", None, "of the estimate, launches", per_cell=True),
    # --- of a quality gate, or a subtask of one
    "score": Metric("%", "higher", "score", per_cell=True),
    "score_low": Metric("%", None, "lower end of the score's 95% interval", per_cell=True),
    "score_high": Metric("%", None, "upper end of the score's 95% interval", per_cell=True),
    "threshold": Metric("%", None, "score that the gate asks for", per_cell=True),
    "baseline": Metric("%", None, "published score of the unquantized model", per_cell=True),
    "reference_score": Metric("%", None, "score of the model in full precision, same items", per_cell=True),
    "lost_items": Metric("items", "lower", "items that full precision alone gets right", per_cell=True),
    "gained_items": Metric("items", None, "items that full precision alone gets wrong", per_cell=True),
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
