"""Does a server still answer well? The competition's quality gates through lm-eval, with 95% intervals.

    python bench/quality.py --url http://127.0.0.1:8080 --tasks nano
    python bench/quality.py --tasks official --limit 0.1 --out results.json

official: MMLU-Pro, IFEval, GPQA-Diamond and GSM8K, fetched from the hub. nano: the shapes of the first
three on the bundled model's held-out items, no network needed. Or names: gates, or lm-eval tasks that
generate text.

A score's interval is Wilson's, on the effective number of items where subtasks weigh the same or an item has
several outcomes. The verdict is undecided while the threshold lies inside it; with every item asked the score
itself decides. Every reply is kept beside --out, in .samples.jsonl.
"""

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.gates.gate import NANO_FOLDER, NANO_NAMES, OFFICIAL
from bench.options import base_parser, natural, positive, run


def quality(args: argparse.Namespace) -> int:
    """The verb. Exit status 0 when every gate was measured, whatever the verdicts."""
    from bench.gates.measure import measure  # lm-eval takes seconds to import: not for --help

    return measure(args)


def share_or_count(text: str) -> float:
    """An argparse type: a share in (0, 1) or a whole number of at least 1."""
    value = float(text)
    if not (0 < value < 1 or (value >= 1 and value == int(value))):
        raise argparse.ArgumentTypeError(f"{text}: want a share below 1, or a whole number of at least 1")
    return value


def gate_folder(text: str) -> tuple[str, Path]:
    """An argparse type: GATE=FOLDER."""
    name, equals, folder = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: want GATE=FOLDER")
    return name, Path(folder)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = base_parser(__doc__ or "")
    made.prog = "python bench/quality.py"
    made.set_defaults(timeout=3600.0)
    group = made.add_argument_group("gates")
    names = ", ".join([*(gate.name for gate in OFFICIAL), *NANO_NAMES])
    group.add_argument("--tasks", default="nano", help=f"nano, official, gates ({names}), or lm-eval tasks")
    group.add_argument(
        "--limit",
        type=share_or_count,
        help="items of each subtask: a share below 1, or a number (all of them)",
    )
    group.add_argument("--seed", type=int, default=0, help="of the draw of a limited run's items")
    group.add_argument(
        "--first", action="store_true", help="the first items, as lm-eval takes them, not a draw"
    )
    group.add_argument("--concurrency", type=positive, default=8, help="requests under way at once")
    group.add_argument("--retries", type=natural, default=4, help="further attempts after a passing failure")
    group.add_argument(
        "--single-turn",
        action="store_true",
        help="few-shot examples in one message with the question (lm-eval: a message each)",
    )
    group.add_argument(
        "--data",
        metavar="GATE=FOLDER",
        type=gate_folder,
        action="append",
        help="a dataset's local copy in Hugging Face's layout, instead of the hub; may be repeated",
    )
    group.add_argument(
        "--nano", type=Path, default=NANO_FOLDER, metavar="FOLDER", help="with heldout/ and reference.json"
    )
    return made


if __name__ == "__main__":
    sys.exit(run(parser(), quality))
