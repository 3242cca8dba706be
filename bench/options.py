"""What every verb's command line has in common."""

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from bench.errors import BenchError


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines and names each default that says something."""

    def _get_help_string(self, action: argparse.Action) -> str:
        says = action.default not in (None, False, argparse.SUPPRESS) and action.option_strings
        return f"{action.help or ''} (default: {action.default})" if says else action.help or ""


def base_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every verb against a server takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8080", help="where the server listens")
    server.add_argument("--model", help="`model` in the requests and the record (else the server is asked)")
    server.add_argument("--api-key", help="sent as a bearer token")
    server.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take")
    server.add_argument("--card", help="the server's graphics card, for the record (asked locally otherwise)")
    add_output_options(parser)
    return parser


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where the result goes, in every verb."""
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, help="results file (JSON); the picture goes beside it as .png")
    output.add_argument("--plot", type=Path, help="the picture's own file (.png, .svg or .pdf)")


def add_prompt_options(group: argparse._ArgumentGroup) -> None:
    """Whose tokens are counted, and what the made-up prompts are like."""
    group.add_argument(
        "--tokenizer", help="a .gguf, a folder with tokenizer.json, or a hub id (else /tokenize)"
    )
    group.add_argument("--stop-at-eos", action="store_true", help="let answers to random prompts end early")
    group.add_argument("--seed", type=int, default=0, help="of the random prompts")


def picture_path(args: argparse.Namespace) -> Path | None:
    """Where the picture goes: --plot, else beside --out, else nowhere."""
    if args.plot is not None:
        return Path(args.plot)
    return Path(args.out).with_suffix(".png") if args.out is not None else None


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: want at least 1")
    return value


def natural(text: str) -> int:
    """An argparse type: an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: want at least 0")
    return value


def positives(text: str) -> list[int]:
    """An argparse type: comma-separated integers of at least 1."""
    return [positive(part) for part in text.split(",")]


def run(
    parser: argparse.ArgumentParser,
    verb: Callable[[argparse.Namespace], Coroutine[Any, Any, int] | int],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse, run the verb, and return its exit status: 1 after a BenchError, 130 after Ctrl-C."""
    args = parser.parse_args(argv)
    args.command = [parser.prog, *(sys.argv[1:] if argv is None else argv)]
    try:
        status = verb(args)
        return asyncio.run(status) if asyncio.iscoroutine(status) else status
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
