"""Sentences, Chinese and code written for the tokenizer and for raw continuation."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def texts() -> tuple[str, ...]:
    """The files of this folder, whole."""
    return tuple(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.txt")))


@cache
def lines() -> tuple[str, ...]:
    """Their lines that are not empty."""
    return tuple(line for text in texts() for line in text.splitlines() if line.strip())
