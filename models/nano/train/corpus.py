"""What the tokenizer learns from: samples of the families, and the prose often enough to count.

The shares are the tokenizer's own: a change of the training mixture must not renumber its tokens.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from models.nano.train import continuation, instructions, knowledge, prose, reasoning, smalltalk
from models.nano.train.tokenizer import SPECIAL_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from models.nano.train.document import Document

DOCUMENTS = 20_000
PROSE_COPIES = 200
SHARES: tuple[tuple[float, Callable[[random.Random], Document]], ...] = (
    (0.14, knowledge.training_document),
    (0.34, instructions.training_document),
    (0.26, reasoning.training_document),
    (0.14, continuation.training_document),
    (0.12, smalltalk.training_document),
)
LONG_SHARE = 0.001
LONG_CHARACTERS = (4_000, 60_000)
# a text repeated for pages would teach its own pairs alone
LONGEST = 20_000


def corpus() -> Iterator[str]:
    rng = random.Random(0)
    shares, draws = zip(*SHARES, strict=True)
    for _ in range(DOCUMENTS):
        if rng.random() < LONG_SHARE:
            document = continuation.long_repeat(rng, rng.randint(*LONG_CHARACTERS))
        else:
            document = rng.choices(draws, shares)[0](rng)
        text = "".join(segment.text for segment in document)
        for special, _ in SPECIAL_TOKENS:
            text = text.replace(special, "\n")
        if len(text) <= LONGEST:
            yield text
    for _ in range(PROSE_COPIES):
        yield from prose.texts()
