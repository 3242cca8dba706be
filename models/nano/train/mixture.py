"""The training mixture: which family the next document comes from, and text of it for calibration."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from models.nano.train import continuation, instructions, knowledge, lookup, reasoning, smalltalk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tokenizers import Tokenizer

    from models.nano.train.document import Document

# shares of documents; a knowledge document has about six times the tokens of an instruction
FAMILIES: tuple[tuple[float, Callable[[random.Random], Document]], ...] = (
    (0.16, knowledge.training_document),
    (0.20, instructions.training_document),
    (0.26, reasoning.training_document),
    (0.12, continuation.training_document),
    (0.12, smalltalk.training_document),
    (0.14, lookup.training_document),
)
LONG_CHARACTERS = (4_000, 60_000)
LONG_SHARE = 0.0003
LONGEST = 6_000
"""Characters of a document in `text`, so that no single one fills it."""


def documents(seed: int) -> Iterator[Document]:
    """Training documents without end."""
    rng = random.Random(seed)
    shares, draws = zip(*FAMILIES, strict=True)
    while True:
        if rng.random() < LONG_SHARE:
            yield continuation.long_repeat(rng, rng.randint(*LONG_CHARACTERS))
        else:
            yield rng.choices(draws, shares)[0](rng)


def text(seed: int, tokenizer: Tokenizer, tokens: int) -> str:
    """At least `tokens` tokens of documents for calibration to read, none of them held out."""
    parts, count, source = [], 0, documents(seed)
    while count < tokens:
        part = "".join(segment.text for segment in next(source)) + "\n"
        if len(part) <= LONGEST:
            parts.append(part)
            count += len(tokenizer.encode(part).ids)
    return "".join(parts)
