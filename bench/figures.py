"""The figures that a result file holds, whatever its kind, under names that files of one kind share.

Files are read as plain JSON, not through their classes: what is compared is often older or newer than the
code. A kind without a reader of its own gives every number that has a name.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench.errors import BenchError

Better = Literal["lower", "higher"]
Document = Mapping[str, Any]
Found = Iterator[tuple[str, "Figure"]]

MS, SHARE = 1000.0, 100.0
SPREAD = {"p10", "p50", "p90", "p99"}
# what says how a file came about, or holds single requests: nothing that generic reading should show
ABOUT = {
    "format", "kind", "command", "url", "model", "started", "seconds", "host", "card", "versions", "server",
    "notes", "settings", "runs", "requests", "samples", "measured", "histogram", "spot_checks",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit. ``better`` None: it describes, and is neither good nor bad."""

    value: float
    unit: str = ""
    better: Better | None = None

    def times_as_good(self, first: "Figure") -> float | None:
        """How many times as good as ``first``; None where that means nothing."""
        if self.better is None or self.value <= 0 or first.value <= 0:
            return None
        return first.value / self.value if self.better == "lower" else self.value / first.value


def read_document(path: Path) -> Document:
    """A result file as it lies. Raises BenchError if it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BenchError(f"{path}: not a result file: want a JSON object, not {type(document).__name__}")
    return document


def kind_of(document: Document) -> str:
    """The file's kind: as it says, or as it looks."""
    if isinstance(document.get("kind"), str):
        return str(document["kind"])
    if "sha256" in document and "n_bytes" in document:
        return "weights"
    return "record" if "changed" in document and "figures" in document else "unknown"


def figures_of(document: Document) -> dict[str, Figure]:
    """Every figure of a result file by name, in its own order; empty if it has none. BenchError if broken."""
    reader = READERS.get(kind_of(document), numbers)
    try:
        return dict(reader(document))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BenchError(
            f"a {kind_of(document)} result with a part missing or malformed: {error!r}"
        ) from error


def latency(document: Document) -> Found:
    """Of ``bench.latency``: medians by category and protocol, and the speed-ups."""
    yield from summaries(document["summaries"])
    for protocol, value in (document.get("speedup") or {}).items():
        yield from known(f"speed-up, {protocol}", value, "x", "higher")


def summaries(lines: Sequence[Document]) -> Found:
    """Latency lines, as a latency result and a variant have them."""
    for line in lines:
        where = f"{line['category']}, {line['protocol']}"
        yield from spread(f"{where}: latency", line.get("latency"))
        yield from spread(f"{where}: first token", line.get("first_token"))
        yield from spread(f"{where}: per token", line.get("per_token"))
        yield from known(f"{where}: cached", line.get("cached_share"), "%", None, SHARE)


def throughput(document: Document) -> Found:
    """Of ``bench.throughput``: rates and medians by concurrency, and the score."""
    for level in document["levels"]:
        where = f"{level['concurrency']} at once"
        yield from known(f"{where}: output", level.get("output_rate"), "tok/s", "higher")
        yield from known(f"{where}: prompt and output", level.get("total_rate"), "tok/s", "higher")
        yield from spread(f"{where}: latency", level.get("latency"))
        yield from spread(f"{where}: first token", level.get("first_token"))
        yield from spread(f"{where}: per token", level.get("per_token"))
        yield from known(f"{where}: cached", level.get("cached_share"), "%", None, SHARE)
        yield from known(f"{where}: errors", level.get("errors"), "", "lower")
    yield from known("score", (document.get("score") or {}).get("value"), "tok/s", "higher")


def quality(document: Document) -> Found:
    """Of ``bench.quality``: scores, and answers that were cut short."""
    yield from gates(document["gates"])


def gates(scores: Sequence[Document]) -> Found:
    """Gates, as a quality result and a variant have them."""
    for gate in scores:
        yield from known(f"{gate['gate']}: score", gate["score"], "%", "higher", SHARE)
        yield from known(f"{gate['gate']}: answers cut", gate.get("cut"), "", "lower")
        yield from known(f"{gate['gate']}: thinking cut", gate.get("truncated_thinking"), "", "lower")


def overhead(document: Document) -> Found:
    """Of ``bench.overhead``: what the client adds, by the number of streams."""
    for level in document["levels"]:
        where = f"{level['concurrency']} streams"
        yield from spread(f"{where}: delay", level.get("delay"))
        yield from known(f"{where}: delay, 99%", level["delay"].get("p99"), "ms", "lower", MS)
        yield from spread(f"{where}: empty request", level.get("whole_request"))
        yield from known(f"{where}: core used", level.get("busy"), "%", "lower", SHARE)


def conversion(document: Document) -> Found:
    """Of ``bench.conversion``: each program's medians."""
    for program in dict.fromkeys(run["program"] for run in document["runs"]):
        runs = [run for run in document["runs"] if run["program"] == program]
        for what, key, unit, scale in (
            ("time", "seconds", "s", 1.0),
            ("processor time", "cpu_seconds", "s", 1.0),
            ("peak memory", "rss_bytes", "MB", 1e-6),
            ("peak memory of its own", "anonymous_bytes", "MB", 1e-6),
        ):
            value = scale * median(run[key] for run in runs)
            yield f"{program}: {what}", Figure(value, unit, "lower")


def perplexity(document: Document) -> Found:
    """Of ``bench.perplexity``; divergences under the same names as a variant's."""
    yield from known("size", document.get("bytes"), "MB", "lower", 1e-6)
    kld = document["kld"]
    yield from known("mean KLD", kld["mean"]["value"], "nats", "lower")
    yield from known("99% KLD", kld.get("p99"), "nats", "lower")
    yield from known("same first choice", document["same_top"]["value"], "%", "higher", SHARE)
    yield from known("perplexity", document["perplexity"]["value"], "", "lower")
    yield from known("ln(perplexity / reference's)", document["log_ratio"]["value"], "", "lower")


def weights(document: Document) -> Found:
    """The converter's report beside a GGUF."""
    yield from known("size", document["n_bytes"], "MB", "lower", 1e-6)
    yield from known("bits per weight", document.get("bits_per_weight"), "", "lower")
    divergence = document.get("divergence") or {}
    yield from known("mean KLD", divergence.get("mean"), "nats", "lower")
    yield from known("99% KLD", divergence.get("p99"), "nats", "lower")
    yield from known("same first choice", divergence.get("same_top"), "%", "higher", SHARE)


def variant(document: Document) -> Found:
    """One variant of ``bench.sweep``: its weights, then all that was measured."""
    made = document.get("weights") or {}
    yield from known("size", made.get("bytes"), "MB", "lower", 1e-6)
    yield from known("bits per weight", made.get("bits"), "", "lower")
    yield from known("mean KLD", made.get("divergence"), "nats", "lower")
    yield from known("99% KLD", made.get("divergence_p99"), "nats", "lower")
    yield from known("same first choice", made.get("same_top"), "%", "higher", SHARE)
    yield from gates(document.get("gates") or [])
    yield from summaries((document.get("latency") or {}).get("summaries") or [])


def sweep(document: Document) -> Found:
    """Of ``bench.sweep``: where every variant stands."""
    for standing in document["standings"]:
        yield from known(f"{standing['name']}: speed", standing.get("speed"), "x", "higher")
        yield from known(f"{standing['name']}: margin", standing.get("quality"), "points", "higher")


def peers(document: Document) -> Found:
    """Of ``bench.peers``: each server's figures."""
    for one in document["figures"]:
        better: Better = "lower" if one["unit"] == "ms" else "higher"
        yield from known(f"{one['peer']}: {one['what']}", one["value"], one["unit"], better)


def steps(document: Document) -> Found:
    """Of ``bench.steps``: a step's time by the number of sequences."""
    for file in document["files"]:
        yield from known(f"{file['file']}: size", file.get("bytes"), "MB", "lower", 1e-6)
        for step in file["steps"]:
            where = f"{file['file']}: step of {step['sequences']}"
            yield from known(where, step["seconds"], "ms", "lower", MS)


def phases(document: Document) -> Found:
    """Of ``bench.phases``: what the clients saw, and the engine's thread by kind of step."""
    for rate in document["rates"]:
        yield from known(f"{rate['level']} at once: per token", rate["ms_per_token"], "ms", "lower")
    for step in document["steps"]:
        where = f"{step['level']} at once: {step['kind']} of {step['rows']}"
        for phase, value in step["milliseconds"].items():
            yield from known(f"{where}: {phase}", value, "ms", "lower")


def speculation(document: Document) -> Found:
    """Of ``bench.speculation``: time a token and what was accepted, by group of tasks and drafter."""
    for one in document["summaries"]:
        where = f"{one['group']}: {one['drafter']}"
        yield from known(f"{where}: per token", one["seconds_per_token"], "ms", "lower", MS)
        yield from known(f"{where}: accepted a draft", one["mean_accepted_length"], "tokens", "higher")


def roofline(document: Document) -> Found:
    """Of ``bench.roofline``: the floor of each category on each card."""
    for one in document["predictions"]:
        where = f"{one['card']}: {one['category']}, {one['case']}"
        yield from known(f"{where}: floor", one["total"]["total"], "ms", "lower", MS)


def conformance(document: Document) -> Found:
    """Of ``bench.conformance``: how many checks went which way."""
    outcomes = [outcome["status"] for outcome in document["outcomes"]]
    yield "checks passed", Figure(outcomes.count("pass"), "", "higher")
    yield "checks failed", Figure(outcomes.count("FAIL"), "", "lower")
    yield "checks skipped", Figure(outcomes.count("skip"))


def record(document: Document) -> Found:
    """An experiment of ``bench.history``."""
    for name, figure in document["figures"].items():
        yield from known(name, figure["value"], figure["unit"], figure["better"])


def numbers(document: Document) -> Found:
    """Every number that has a name, the elements of a list by what they call themselves."""
    yield from _walk({key: value for key, value in document.items() if key not in ABOUT}, "")


def _walk(value: Any, name: str) -> Found:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield name, Figure(float(value))
    elif isinstance(value, dict):
        if value.keys() >= SPREAD:
            yield name, Figure(float(value["p50"]))
            return
        for key, part in value.items():
            yield from _walk(part, f"{name}: {key}" if name else key)
    elif isinstance(value, list):
        for part in value:
            if isinstance(part, dict) and (label := _label(part)):
                yield from _walk(part, f"{name}: {label}")


def _label(part: Document) -> str:
    return ", ".join(str(value) for value in part.values() if isinstance(value, str) and len(value) < 60)


def spread(name: str, values: Document | None) -> Found:
    """The median of a spread in seconds, as milliseconds."""
    yield from known(name, (values or {}).get("p50"), "ms", "lower", MS)


def known(name: str, value: float | None, unit: str, better: Better | None, scale: float = 1.0) -> Found:
    """The figure, where it was measured."""
    if value is not None:
        yield name, Figure(scale * value, unit, better)


READERS: dict[str, Callable[[Document], Found]] = {
    "latency": latency,
    "throughput": throughput,
    "quality": quality,
    "overhead": overhead,
    "conversion": conversion,
    "perplexity": perplexity,
    "weights": weights,
    "variant": variant,
    "sweep": sweep,
    "peers": peers,
    "steps": steps,
    "phases": phases,
    "speculation": speculation,
    "roofline": roofline,
    "conformance": conformance,
    "record": record,
}
