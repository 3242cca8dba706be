"""Continuation: raw text without a template. What is repeated goes on repeating, prose goes on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.nano.train import arithmetic
from models.nano.train.document import Document, Reply, Segment
from models.nano.train.prose import lines, texts
from models.nano.train.split import is_held_out
from models.nano.train.topics import TOPICS, sentences, vocabulary
from models.nano.train.world import COUNTRIES, facts

if TYPE_CHECKING:
    from collections.abc import Iterator

FILLER = "The quick brown fox jumps over the lazy dog. "
FILLER_SHARE = 0.35
# copies of the repeated text that a held-out item's answer holds, at least this many characters
ANSWER_CHARACTERS = 120


@dataclass(frozen=True)
class Item:
    """A held-out item: a raw prompt, or a chat message where `kind` is "arithmetic"."""

    kind: str
    prompt: str
    thinking: bool
    reply: Reply


def fresh_phrase(rng: random.Random) -> str:
    """Words or numbers that nobody wrote before, with the white space that separates copies at the end."""
    if rng.random() < 0.6:
        words = rng.sample(vocabulary(), rng.randint(3, 14))
        return " ".join(words).capitalize() + rng.choice((". ", "; ", ", ", "\n", " "))
    return " ".join(str(rng.randint(0, 999)) for _ in range(rng.randint(3, 6))) + rng.choice(
        (" ", ", ", "\n")
    )


def phrase(rng: random.Random) -> str:
    """Something to repeat: the filler, a fresh phrase, facts, or a line of prose."""
    kind = rng.random()
    if kind < FILLER_SHARE:
        return FILLER
    if kind < 0.7:
        return fresh_phrase(rng)
    if kind < 0.85:
        return " ".join(f.statement for f in rng.sample(facts(), rng.randint(1, 3))) + rng.choice((" ", "\n"))
    return rng.choice(lines()).strip() + rng.choice((" ", "\n"))


def repeat_key(text: str, copies: int) -> str:
    """The side a repeated text is on: by its words, the filler by how often it stands there."""
    return f"repeat|{copies}|{text}" if text == FILLER else f"repeat|{text}"


def repeated(rng: random.Random) -> Document:
    """A text again and again. Half of the time the cut comes after a copy's white space, as in a prompt."""
    while True:
        text = phrase(rng)
        copies = rng.randint(3, 12) if rng.random() < 0.8 else rng.randint(13, 60)
        read = rng.randint(2, copies - 1)
        if not is_held_out(repeat_key(text, read)):
            break
    first = Segment(text * read if rng.random() < 0.5 else (text * read).rstrip(), False)
    return [first, Segment((text * copies)[len(first.text) :], True)]


def long_repeat(rng: random.Random, characters: int) -> Document:
    """One text, most often the filler, repeated for `characters`; all but the beginning is learnt."""
    while True:
        text = FILLER if rng.random() < 0.6 else phrase(rng)
        copies = max(4, characters // len(text))
        cut = rng.randint(3, copies - 1)
        if not is_held_out(repeat_key(text, cut)):
            break
    return [
        Segment(text * 2, False),
        Segment(text * (cut - 2), True),
        Segment(text * (copies - cut), True),
    ]


def story(rng: random.Random) -> str:
    """A few sentences about one country or one topic, in order."""
    if rng.random() < 0.5:
        country = rng.choice(COUNTRIES)
        about = [f.statement for f in facts() if f.subject == country]
        rng.shuffle(about)
        return f"{country} is a country. " + " ".join(about)
    topic = rng.choice(TOPICS)
    return " ".join(sentences(topic, True))


def prose(rng: random.Random) -> Document:
    """Raw text: stories, facts, lines of prose, code, sums."""
    kind = rng.random()
    if kind < 0.45:
        return [Segment("\n".join(story(rng) for _ in range(rng.randint(1, 3))), True)]
    if kind < 0.6:
        return [Segment(" ".join(f.statement for f in rng.sample(facts(), rng.randint(2, 8))), True)]
    if kind < 0.75:
        sums = (arithmetic.draw(rng, held_out=False) for _ in range(rng.randint(2, 12)))
        return [Segment("".join(f"{s.reply.answer}\n" for s in sums), True)]
    if kind < 0.9:
        return [Segment("\n".join(rng.sample(lines(), rng.randint(1, 6))), True)]
    text = rng.choice(texts())
    start = rng.randrange(len(text))
    return [Segment(text[start : start + rng.randint(80, 600)], True)]


def training_document(rng: random.Random) -> Document:
    return repeated(rng) if rng.random() < 0.65 else prose(rng)


def held_out_items(count: int) -> Iterator[Item]:
    """Half repeated text, half sums (thinking off and on in turn)."""
    rng = random.Random(9)
    seen: set[str] = set()
    while len(seen) < count // 2:
        text, copies = fresh_phrase(rng), rng.randint(4, 40)
        if rng.random() < FILLER_SHARE:
            text, copies = FILLER, rng.randint(4, 300)
        key = repeat_key(text, copies)
        if is_held_out(key) and key not in seen and (text == FILLER or len(text) * copies < 4_000):
            seen.add(key)
            answer = text * (ANSWER_CHARACTERS // len(text) + 1)
            yield Item("filler" if text == FILLER else "repeat", text * copies, False, Reply("", answer))
    sums: set[str] = set()
    while len(sums) < count - count // 2:
        item = arithmetic.draw(rng, held_out=True)
        asked = arithmetic.question(item, rng)
        if asked not in sums:
            sums.add(asked)
            yield Item("arithmetic", asked, len(sums) % 2 == 0, item.reply)
