"""``qwen-bench``, also ``python -m qwen_serve.bench``: one command for every measurement.

A command is a function with typed parameters (cyclopts), imported when it is asked for. It returns its exit
status, or None for 0; BenchError is what its user can mend.
"""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qwen_serve.bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from cyclopts import App

COMMANDS = {
    "latency": (
        "qwen_serve.bench.load.latency:latency",
        "One request at a time: the same prompt again, and another one each time.",
    ),
    "throughput": (
        "qwen_serve.bench.load.throughput:throughput",
        "Many requests: levels of concurrency, or request rates.",
    ),
    "peers": ("qwen_serve.bench.servers.peers:peers", "Several servers in turns on one model, with ratios."),
    "start": (
        "qwen_serve.bench.servers.start:start",
        "How long servers take to start, in turns; ours by stage.",
    ),
    "experiment": (
        "qwen_serve.bench.experiments.run:experiment",
        "A series of measurements, described in TOML.",
    ),
    "soak": ("qwen_serve.bench.load.soak:soak", "Mixed load for minutes or hours: failures, drift, leaks."),
    "grammar-cost": (
        "qwen_serve.bench.engine.grammar:grammar_cost",
        "The engine alone: answers kept to a schema.",
    ),
    "sampling-cost": (
        "qwen_serve.bench.engine.sampling:sampling_cost",
        "The engine alone: ways to the next token.",
    ),
    "prefix-cost": (
        "qwen_serve.bench.engine.prefix_cache:prefix_cost",
        "The engine alone: holding and sharing states.",
    ),
    "draft-cost": ("qwen_serve.bench.engine.drafts:draft_cost", "The engine alone: ways to draft, in turns."),
    "kv-cache": (
        "qwen_serve.bench.engine.kv_cache:kv_cache",
        "Types of the KV cache: bytes, time, divergence, retrieval from far back.",
    ),
    "build": ("qwen_serve.bench.servers.builds:build", "Build llama.cpp's programs, to compare with."),
    "compare": ("qwen_serve.bench.report.compare:compare", "Subjects of one run or of several side by side."),
    "report": (
        "qwen_serve.bench.report.report:report",
        "Tables, pictures and one page from what a store holds.",
    ),
    "synthetic": (
        "qwen_serve.bench.models.synthetic:synthetic",
        "Write a made-up model for measuring speed alone.",
    ),
    "roofline": (
        "qwen_serve.bench.analysis.roofline:roofline",
        "What a request would take on a card: an estimate.",
    ),
    "quality": (
        "qwen_serve.bench.gates.quality:quality",
        "Quality gates through lm-eval, with 95% intervals.",
    ),
    "paired": (
        "qwen_serve.bench.gates.paired:paired",
        "Two models' answers to the same items: which is better, item by item.",
    ),
    "perplexity": (
        "qwen_serve.bench.gates.perplexity:perplexity",
        "How far a GGUF is from its reference: perplexity and KL divergence over a text.",
    ),
    "conformance": (
        "qwen_serve.bench.checks.conformance:conformance",
        "The server's contract as checks, pass or fail a line each.",
    ),
    "clients": (
        "qwen_serve.bench.clients.run:clients",
        "The clients people use, each with its snippet of docs/clients.md.",
    ),
    "sweep": (
        "qwen_serve.bench.variants.sweep:sweep",
        "Which quant to ship: convert, serve, measure and rank the variants of a model.",
    ),
    "variants": (
        "qwen_serve.bench.variants.catalogue:variants",
        "What comes with the package: settings, predicted latency, recorded gates.",
    ),
    "submit": (
        "qwen_serve.bench.submission.submit:submit",
        "Hand an image in: the competition's rules checked, then uploaded.",
    ),
}
"""By name: where it is, and what it answers."""


def make_app(asked: str | None) -> App:
    """The command ``asked`` for brings its own help; the others' would import everything there is."""
    from cyclopts import App

    app = App(
        name="qwen-bench",
        help="Measure any OpenAI-shaped server. Every run is recorded in a store (--out).",
        result_action="return_value",
        version_flags=(),
        suppress_keyboard_interrupt=False,  # main says what it says of it
    )
    for name, (where, what) in COMMANDS.items():
        app.command(where, name=name, help=None if name == asked else what)
    return app


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit with 143: what is measured is kept, and servers that were started are
    stopped."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


INSTALL = "pip install 'qwen-serve[bench]'"


def help_without_extras(asked: str | None, missing: str | None) -> str:
    """What there is, where the packages that bring each command's own help are not installed."""
    shown = {asked: COMMANDS[asked]} if asked in COMMANDS else COMMANDS
    lines = [f"  {name:15} {what}" for name, (_, what) in shown.items()]
    need = f"Commands and their options need the extra `bench` ({missing} is missing): {INSTALL}"
    return "\n".join(["Usage: qwen-bench COMMAND", "", *lines, "", need])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Exit status: the command's; 1 after a BenchError, 130 after Ctrl-C; exits with
    143 after SIGTERM, with 2 for wrong options."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with ended_by_sigterm():
            status = make_app(words[0] if words else None)(words)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "qwen_serve").partition(".")[0] == "qwen_serve":
            raise
        asked = words[0] if words else None
        helps = not words or bool({"-h", "--help"} & {*words})
        print(help_without_extras(asked, error.name), file=sys.stdout if helps else sys.stderr)
        return 0 if helps else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status if isinstance(status, int) else 0
