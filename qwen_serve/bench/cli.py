"""``qwen-bench``, also ``python -m qwen_serve.bench``: one command for every measurement.

A command is a function with typed parameters (cyclopts), which is imported when the command runs. It returns
its exit status, or None for 0. It raises BenchError for errors that the user can fix.
"""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from qwen_serve.bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from cyclopts import App


@dataclass(frozen=True)
class Command:
    """``what``: the help's line; ``where``: module:function, None if the command has only subcommands;
    ``parts``: its subcommands."""

    what: str
    where: str | None = None
    parts: Mapping[str, Command] = field(default_factory=dict)


COMMANDS = {
    "latency": Command(
        "One request at a time: latency with a repeated prompt, and with new ones.",
        "qwen_serve.bench.load.latency:latency",
    ),
    "throughput": Command(
        "Throughput of many requests, by concurrency or by request rate.",
        "qwen_serve.bench.load.throughput:throughput",
    ),
    "peers": Command(
        "Several servers in turns, on one model, with ratios and intervals.",
        "qwen_serve.bench.servers.peers:peers",
    ),
    "start": Command(
        "Start times of servers, in turns; of qwen-serve by stage.", "qwen_serve.bench.servers.start:start"
    ),
    "experiment": Command(
        "A series of measurements, described in TOML.", "qwen_serve.bench.experiments.run:experiment"
    ),
    "record": Command(
        "An hour on one card (latency, throughput, gates, start, clocks) in one file to send in.",
        "qwen_serve.bench.record.command:record",
    ),
    "soak": Command(
        "Mixed load for minutes or hours; reports failures, drift and leaks.",
        "qwen_serve.bench.load.soak:soak",
        {
            "answers": Command(
                "The same requests alone and together: are the answers the same, bit for bit?",
                "qwen_serve.bench.servers.answers:answers",
            )
        },
    ),
    "conformance": Command(
        "The API's contract as checks, one line each.",
        "qwen_serve.bench.checks.conformance:conformance",
        {
            "clients": Command(
                "Common clients, each with its snippet of docs/clients.md.",
                "qwen_serve.bench.clients.run:clients",
            )
        },
    ),
    "quality": Command(
        "Quality gates through lm-eval, with 95% intervals.",
        "qwen_serve.bench.gates.quality:quality",
        {
            "paired": Command(
                "Two models on the same items, compared item by item.",
                "qwen_serve.bench.gates.paired:paired",
            ),
            "levels": Command(
                "What levels lose, by rounding method: on a model's own text, on others, and at depth.",
                "qwen_serve.bench.gates.levels:levels",
            ),
            "perplexity": Command(
                "Perplexity of a GGUF, and its KL divergence from a reference.",
                "qwen_serve.bench.gates.perplexity:perplexity",
            ),
        },
    ),
    "sweep": Command(
        "Which quant to ship: convert, serve, measure and rank the variants of a model.",
        "qwen_serve.bench.variants.sweep:sweep",
        {
            "variants": Command(
                "The bundled variants: settings, predicted latency, recorded gates.",
                "qwen_serve.bench.variants.catalogue:variants",
            )
        },
    ),
    "engine": Command(
        "Cost of the engine's parts, without a server; the lower bound of a card.",
        parts={
            "drafts": Command("Each way to draft, in turns.", "qwen_serve.bench.engine.drafts:drafts"),
            "kv-cache": Command(
                "Types of the KV cache: bytes, time, divergence, retrieval over long distances.",
                "qwen_serve.bench.engine.kv_cache:kv_cache",
            ),
            "roofline": Command(
                "Predicted time of a request on a card.",
                "qwen_serve.bench.analysis.roofline:roofline",
            ),
        },
    ),
    "report": Command(
        "Tables, charts and a page from recorded runs; --compare shows runs side by side.",
        "qwen_serve.bench.report.report:report",
    ),
    "build": Command(
        "Build llama.cpp's programs, for comparisons.",
        "qwen_serve.bench.servers.builds:build",
        {
            "synthetic": Command(
                "Write the synthetic model, which measures speed only.",
                "qwen_serve.bench.models.command:synthetic",
            )
        },
    ),
}

GROUPS = {
    "Measure a server": ("latency", "throughput", "peers", "start", "experiment", "record"),
    "Check a server": ("conformance", "soak"),
    "Measure a model's quality": ("quality", "sweep"),
    "Measure the engine": ("engine",),
    "Results": ("report",),
    "Build": ("build",),
}
"""Heading in the help -> commands."""

HELP = """Measure any server with OpenAI's API. Every run is recorded in a folder (--out).

- `qwen-bench latency --url http://127.0.0.1:8080 --runs 50`
- `qwen-bench throughput --url http://127.0.0.1:8080 --levels 1,8,64`
- `qwen-bench peers --gguf x.gguf --peer a=server --peer b=llama-server:tuned`
- `qwen-bench report results`
"""


def shown_default(value: Any) -> str | None:
    """A default as the help shows it; None for those that say nothing: None, False, "" and ()."""
    return None if value is None or value is False or value in ("", ()) else str(value)


def make_app(words: Sequence[str]) -> App:
    """Build the app for the command line ``words``. Only the command that they name is imported, because
    importing all of them is slow."""
    from cyclopts import App, Group, Parameter

    app = App(
        name="qwen-bench",
        help=HELP,
        default_parameter=Parameter(show_default=shown_default),
        result_action="return_value",
        version_flags=(),
        suppress_keyboard_interrupt=False,  # main prints the help instead
    )
    app["--help"].group = Group("Help", sort_key=len(GROUPS))
    asked, part_asked = (*words[:2], None, None)[:2]
    groups = {
        name: group
        for place, (title, names) in enumerate(GROUPS.items())
        for group in [Group(title, sort_key=place)]
        for name in names
    }
    for name, command in COMMANDS.items():
        group = groups.get(name)  # a command without a heading is shown under "Commands"
        if command.where is not None and not (command.parts and name == asked):
            app.command(command.where, name=name, help=None if name == asked else command.what, group=group)
            continue
        own = App(
            name=name, help=command.what if command.where is None else None, version_flags=(), group=group
        )
        if command.where is not None:
            own.default(_function(command.where))
        for part, one in command.parts.items():
            own.command(one.where, name=part, help=None if part == part_asked else one.what)
        app.command(own)
    return app


def _function(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit(143), so that measurements are kept and started servers are stopped."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


INSTALL = "pip install 'qwen-serve[bench]'"


def help_without_extras(asked: str | None, missing: str | None) -> str:
    """The list of commands, for an installation without the packages that a command's own help needs."""
    shown = {asked: COMMANDS[asked]} if asked in COMMANDS else COMMANDS
    lines = [f"  {name:15} {command.what}" for name, command in shown.items()]
    need = f"Commands and their options need the extra `bench` ({missing} is missing): {INSTALL}"
    return "\n".join(["Usage: qwen-bench COMMAND", "", *lines, "", need])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status: the command's, 1 after a BenchError, 130 after Ctrl-C.
    Exits with 143 after SIGTERM and with 2 for wrong options."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with ended_by_sigterm():
            status = make_app(words)(words)
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
