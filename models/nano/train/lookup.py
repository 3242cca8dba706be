"""Reading a list of choices: which letter stands before an item, as knowledge and reasoning need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.nano.train.document import Document, Messages, Reply, Segment, prompt_text, reply_text, user
from models.nano.train.topics import vocabulary
from models.nano.train.world import RELATIONS

if TYPE_CHECKING:
    import random

LETTERS = "ABCDEFGHIJ"
# what may follow an item, up to its letter
LINKS = (
    ". The answer is ({x}).\n",
    ". The answer is ({x}).\n",
    ". That is option {x}.\n",
    ". That is choice {x}.\n",
    ": {x}\n",
)


def items(rng: random.Random, count: int) -> list[str]:
    """Different items of one sort: words, numbers, places, or objects of the made-up world."""
    kind = rng.random()
    if kind < 0.2:
        return rng.sample(vocabulary(), count)
    if kind < 0.5:
        low = rng.randint(0, 100)
        return [str(n) for n in rng.sample(range(low, low + 25), count)]
    if kind < 0.65:
        x, y = rng.randint(-20, 20), rng.randint(-20, 20)
        near = [f"{x + dx}, {y + dy}" for dx in range(-2, 3) for dy in range(-2, 3)]
        return rng.sample(near, count)
    return rng.sample(rng.choice(RELATIONS).objects, count)


def training_document(rng: random.Random) -> Document:
    """A list, then its items in another order, each with its letter; or one of them asked in a chat."""
    count = 10 if rng.random() < 0.4 else rng.randint(3, 10)
    choices = items(rng, count)
    mark = "({x}) {item}\n" if rng.random() < 0.5 else "{x}. {item}\n"
    listed = "".join(mark.format(x=x, item=item) for x, item in zip(LETTERS, choices, strict=False))
    pairs = list(zip(LETTERS, choices, strict=False))
    rng.shuffle(pairs)
    if rng.random() < 0.25:
        letter, item = pairs[0]
        if rng.random() < 0.5:
            asked, answer = f"Which letter is {item}?", f"The answer is ({letter})."
        else:
            asked, answer = f"What is choice {letter}?", f"{item}."
        messages: Messages = user(f"Choices:\n{listed}{asked}")
        head = Segment(prompt_text(messages, False), False)
        return [head, Segment(reply_text(Reply("", answer), False), True)]
    document = [Segment(f"{rng.choice(('Options', 'Choices'))}:\n{listed}", False)]
    link = rng.choice(LINKS)
    for letter, item in pairs:
        start = rng.choice(("The result is ", "It is ", ""))
        document += [Segment(start + item, False), Segment(link.format(x=letter), True)]
    return document
