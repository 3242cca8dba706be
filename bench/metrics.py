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
    # --- of a conversion
    "conversion_time": Metric("s", "lower", "time of a conversion", per_cell=True),
    "cpu_time": Metric("s", "lower", "processor time", per_cell=True),
    "peak_rss": Metric("GB", "lower", "peak memory", per_cell=True),
    "peak_anonymous": Metric("GB", "lower", "peak memory that no file backs", per_cell=True),
    "written": Metric("GB", None, "file written", per_cell=True),
    # --- of passes of the engine alone, of a batch of sequences
    "prefill_time": Metric("ms", "lower", "time to read a prompt", per_cell=True),
    "step_time": Metric("ms", "lower", "time of a decode step", per_cell=True),
    "step_bytes": Metric("GB", "lower", "bytes a decode step moves, by the tensors", per_cell=True),
    # --- of the roofline: computed, never measured
    "predicted_latency": Metric("ms", "lower", "latency, an estimate by the roofline model", per_cell=True),
    "least_latency": Metric("ms", "lower", "latency by the datasheet: nothing can be below", per_cell=True),
    "predicted_memory": Metric("ms", None, "of the estimate, bytes being moved", per_cell=True),
    "predicted_compute": Metric("ms", None, "of the estimate, arithmetic", per_cell=True),
    "predicted_launches": Metric("ms", None, "of the estimate, launches", per_cell=True),
}
"""Further measurements add theirs here."""
