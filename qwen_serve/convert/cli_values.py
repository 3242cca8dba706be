"""Values of flags: each function parses one, and says what would be right."""

import argparse
from math import isfinite
from typing import Final

from qwen_serve.convert.cards import BANDWIDTH
from qwen_serve.convert.search.target import parse_size

MOST_DISTILL_STEPS: Final = 500


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def steps(text: str) -> int:
    if (count := positive(text)) > MOST_DISTILL_STEPS:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_DISTILL_STEPS}, got {text!r}")
    return count


def size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be a positive number, without a unit; got {text!r}")
    return value


def card(text: str) -> str:
    names = {name.upper(): name for name in BANDWIDTH}
    if text.upper() not in names:
        raise argparse.ArgumentTypeError(f"want one of {', '.join(BANDWIDTH)}; got {text!r}")
    return names[text.upper()]
