"""A language model in eighty lines: words are tokens, repeated text is continued, sums are added."""

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = Path(__file__).with_name("words.txt").read_text().split()
PIECE = re.compile(r"<\|[a-z_]+\|>|</?think>| ?[^\W\d_]+|\d|\s|[^\w\s]|_")
SPECIALS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
CANDIDATES = 48


class FakeVocabulary:
    """Ids are given out as texts come along, so every text round-trips; the first ``size`` are fixed."""

    def __init__(self) -> None:
        self._texts = [*SPECIALS, *(f" {word}" for word in WORDS), *"0123456789.,?!+-*/\n"]
        self._ids = {text: i for i, text in enumerate(self._texts)}
        self.size = len(self._texts)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        pieces = [piece for match in PIECE.findall(text) for piece in self._plain(match, special)]
        for piece in pieces:
            if piece not in self._ids:
                self._ids[piece] = len(self._texts)
                self._texts.append(piece)
        return [self._ids[piece] for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[i] for i in ids)

    def __len__(self) -> int:
        return len(self._texts)

    @staticmethod
    def _plain(piece: str, special: bool) -> list[str]:
        return [piece] if special or piece not in SPECIALS else list(piece)


def continuation(
    vocabulary: FakeVocabulary, prompt: Sequence[int], params: Mapping[str, Any]
) -> Iterator[int]:
    """Endless tokens, mostly what followed the last token before; sampling parameters are obeyed."""
    tokens = list(prompt)
    generated: Counter[int] = Counter()
    seed = params.get("seed")
    rng = random.Random(seed if seed is not None else random.random())
    while True:
        logits = logits_after(vocabulary, tokens)
        token = _sample(logits, generated, set(tokens[-64:]), params, rng)
        generated[token] += 1
        tokens.append(token)
        yield token


def logits_after(vocabulary: FakeVocabulary, tokens: Sequence[int]) -> dict[int, float]:
    """What may follow these tokens."""
    last = tokens[-1]
    noise = random.Random(last)
    logits = {noise.randrange(len(SPECIALS), vocabulary.size): 4 * noise.random() for _ in range(CANDIDATES)}
    for i in range(len(tokens) - 2, -1, -1):
        if tokens[i] == last:
            logits[tokens[i + 1]] = 6.0
            break
    return logits


def _sample(
    logits: dict[int, float],
    generated: Counter[int],
    seen: set[int],
    params: Mapping[str, Any],
    rng: random.Random,
) -> int:
    repetition = params.get("repetition_penalty", params.get("repeat_penalty", 1.0))
    for token in logits:
        if token in seen:
            logits[token] /= repetition
        if generated[token]:
            logits[token] -= params.get("presence_penalty", 0.0)
            logits[token] -= params.get("frequency_penalty", 0.0) * generated[token]
    ranked = sorted(logits, key=lambda token: -logits[token])
    temperature = params.get("temperature", 0.0)
    if not temperature:
        return ranked[0]
    ranked = ranked[: params.get("top_k") or len(ranked)]
    weights = [math.exp((logits[token] - logits[ranked[0]]) / temperature) for token in ranked]
    kept = 1 + sum(weight >= params.get("min_p", 0.0) for weight in weights[1:])
    mass, total = 0.0, sum(weights)
    for i, weight in enumerate(weights):
        mass += weight
        if mass >= params.get("top_p", 1.0) * total:
            kept = min(kept, i + 1)
            break
    return rng.choices(ranked[:kept], weights[:kept])[0]


def answer(question: str) -> tuple[str, str]:
    """(reasoning, reply) to the last message of a chat."""
    match = re.search(r"(\d+)\s*\+\s*(\d+)", question)
    if match is None:
        return "The user said something.", f"You said: {question}"
    total = int(match[1]) + int(match[2])
    return f"I add {match[1]} and {match[2]}, which gives {total}.", f"The answer is {total}."
