"""Reasoning: problems of several steps with choices (A) to (D), asked as GPQA's zero-shot chain of thought.

With thinking on, the steps are worked out in the think block; with thinking off, the answer comes at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from models.nano.train.continuation import story
from models.nano.train.document import Document, Reply, chat, user
from models.nano.train.split import held_out, is_held_out

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

LETTERS = "ABCD"
NAMES = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ira",
    "Jon",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pia",
    "Rob",
    "Sue",
    "Tom",
    "Uma",
]
THINGS = [
    "shells",
    "coins",
    "apples",
    "stamps",
    "marbles",
    "cards",
    "pears",
    "books",
    "eggs",
    "stones",
    "keys",
    "beads",
]
COLOURS = ["red", "blue", "green", "white", "black", "yellow"]
GAINS = ("gets {n} more", "finds {n} more", "buys {n} more", "wins {n}")
LOSSES = ("gives away {n}", "loses {n}", "sells {n}", "drops {n}")
COMPASS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


@dataclass(frozen=True)
class Problem:
    """A question, its worked steps, the answer and three wrong answers."""

    question: str
    steps: str
    answer: str
    wrong: list[str]


@dataclass(frozen=True)
class Item:
    """A problem with its choices in order."""

    problem: Problem
    choices: list[str]
    level: Level | None = None

    @property
    def letter(self) -> str:
        return LETTERS[self.choices.index(self.problem.answer)]

    @property
    def prompt(self) -> str:
        """The user message of lm-eval's gpqa_*_cot_zeroshot."""
        return message(self.problem.question, self.choices)

    @property
    def reply(self) -> Reply:
        found = f"{self.problem.steps}\nThe result is {self.problem.answer}. That is choice {self.letter}."
        return Reply(found, f"The answer is ({self.letter}).")

    @property
    def key(self) -> str:
        return "reasoning|" + self.problem.question


def message(question: str, choices: Sequence[str]) -> str:
    lines = "".join(f"({letter}) {choice}\n" for letter, choice in zip(LETTERS, choices, strict=True))
    return (
        f"What is the correct answer to this question:{question}\nChoices:\n{lines}Let's think step by step: "
    )


def near_numbers(answer: int, rng: random.Random) -> list[str]:
    """Three other numbers that careless work could give."""
    pool = [answer + d for d in (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20) if 0 <= answer + d <= 120]
    return [str(n) for n in rng.sample(pool, 3)]


def running_total(rng: random.Random, steps: int) -> Problem:
    """Gains and losses of things, each total below 100."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    start = total = rng.randint(10, 60)
    events, worked = [], [f"Start with {total}."]
    for _ in range(steps):
        gain = total < 15 or (total < 85 and rng.random() < 0.5)
        amount = rng.randint(2, 99 - total) if gain else rng.randint(2, total - 1)
        amount = min(amount, rng.randint(2, 60))
        after = total + amount if gain else total - amount
        events.append(rng.choice(GAINS if gain else LOSSES).format(n=amount))
        worked.append(f"{total} {'+' if gain else '-'} {amount} = {after}.")
        total = after
    story = ", then ".join(events)
    question = f"{name} has {start} {thing}. {name} {story}. How many {thing} are left?"
    return Problem(question, "\n".join(worked), str(total), near_numbers(total, rng))


def letters_chain(rng: random.Random, steps: int) -> Problem:
    """Variables defined one by another."""
    names = rng.sample("abcdefghkmnpqrstuvwxyz", steps + 1)
    values = {names[0]: rng.randint(5, 40)}
    lines, worked = [f"{names[0]} = {values[names[0]]}"], [f"{names[0]} = {values[names[0]]}."]
    for before, name in itertools.pairwise(names):
        plus = values[before] < 20 or (values[before] < 70 and rng.random() < 0.5)
        amount = rng.randint(2, 29) if plus else rng.randint(2, values[before] - 1)
        values[name] = values[before] + amount if plus else values[before] - amount
        sign = "+" if plus else "-"
        lines.append(f"{name} = {before} {sign} {amount}")
        worked.append(f"{name} = {values[before]} {sign} {amount} = {values[name]}.")
    last = names[-1]
    question = f"Let {', '.join(lines)}. What is {last}?"
    return Problem(question, "\n".join(worked), str(values[last]), near_numbers(values[last], rng))


def swapped_boxes(rng: random.Random, steps: int) -> Problem:
    """Balls in numbered boxes, swapped pair by pair."""
    count = rng.randint(4, 5)
    held = rng.sample(COLOURS, count)
    setting = ", ".join(f"box {i + 1} holds a {colour} ball" for i, colour in enumerate(held))
    moves, worked = [], ["Start: " + " ".join(held) + "."]
    for _ in range(steps):
        i, j = sorted(rng.sample(range(count), 2))
        held[i], held[j] = held[j], held[i]
        moves.append(f"{i + 1} and {j + 1}")
        worked.append(f"Swap {i + 1} and {j + 1}: " + " ".join(held) + ".")
    asked = rng.randrange(count)
    question = (
        f"There are {count} boxes: {setting}. We swap the balls of boxes {', then '.join(moves)}. "
        f"Which ball is in box {asked + 1} now?"
    )
    worked.append(f"Box {asked + 1} holds {held[asked]}.")
    wrong = rng.sample([c for c in held if c != held[asked]], 3)
    return Problem(question, "\n".join(worked), held[asked], wrong)


def walk(rng: random.Random, steps: int) -> Problem:
    """Steps on a grid; the answer is the place, x then y."""
    x = y = 0
    moves, worked = [], ["Start at 0, 0."]
    for _ in range(steps):
        way, length = rng.choice(list(COMPASS)), rng.randint(1, 9)
        x, y = x + COMPASS[way][0] * length, y + COMPASS[way][1] * length
        moves.append(f"{length} {way}")
        worked.append(f"{length} {way}: {x}, {y}.")
    pool = [f"{x + dx}, {y + dy}" for dx in (-2, -1, 0, 1, 2) for dy in (-2, -1, 0, 1, 2) if dx or dy]
    question = (
        f"{rng.choice(NAMES)} starts at 0, 0 and walks {', then '.join(moves)}. East adds to the first "
        "number, north to the second. Where does the walk end?"
    )
    return Problem(question, "\n".join(worked), f"{x}, {y}", rng.sample(pool, 3))


def clock(rng: random.Random, steps: int) -> Problem:
    """Hours forward and back on a clock of twelve."""
    hour = rng.randint(1, 12)
    shown = hour
    moves, worked = [], [f"Start at {hour}."]
    for _ in range(steps):
        later, amount = rng.random() < 0.6, rng.randint(2, 11)
        hour = (hour + (amount if later else -amount) - 1) % 12 + 1
        moves.append(f"{amount} hours {'later' if later else 'earlier'}")
        worked.append(f"{amount} {'later' if later else 'earlier'}: {hour}.")
    wrong = rng.sample([h for h in range(1, 13) if h != hour], 3)
    question = f"A clock shows {shown}. We look {', then '.join(moves)}. Which hour does it show at the end?"
    return Problem(question, "\n".join(worked), str(hour), [str(h) for h in wrong])


KINDS: dict[Callable[[random.Random, int], Problem], tuple[int, int]] = {
    running_total: (3, 5),
    letters_chain: (3, 4),
    swapped_boxes: (4, 6),
    walk: (4, 6),
    clock: (4, 6),
}
"""Each kind of problem, and the fewest and most steps it is trained with."""


def draw_item(rng: random.Random) -> Item:
    kind, steps = rng.choice(list(KINDS.items()))
    problem = kind(rng, rng.randint(*steps))
    return Item(problem, shuffled(problem, rng))


def shuffled(problem: Problem, rng: random.Random) -> list[str]:
    """The right answer among the wrong ones."""
    choices = [problem.answer, *problem.wrong]
    rng.shuffle(choices)
    return choices


def training_document(rng: random.Random) -> Document:
    while is_held_out((item := draw_item(rng)).key):
        pass
    thinking = rng.random() < 0.85
    return chat(user(item.prompt), item.reply, thinking)


class Level(StrEnum):
    """What is hard about a held-out problem."""

    DEEP = "most steps"
    STORY = "behind a story"
    STORIES = "behind two stories"


STORIES = {Level.DEEP: 0, Level.STORY: 1, Level.STORIES: 2}


def hard_item(rng: random.Random, level: Level) -> Item:
    """A problem of as many steps as training ever has, or one behind text that does not matter to it."""
    kind, (fewest, most) = rng.choice(list(KINDS.items()))
    problem = kind(rng, most if level is Level.DEEP else rng.randint(fewest, most))
    told = [story(rng) for _ in range(STORIES[level])]
    problem = replace(problem, question=" ".join([*told, problem.question]))
    return Item(problem, shuffled(problem, rng), level)


def held_out_items(count: int) -> Iterator[Item]:
    """`count` distinct held-out problems, every level as often."""
    levels = [
        held_out(partial(hard_item, level=level), seed, -(-count // len(Level)))
        for seed, level in enumerate(Level, 80)
    ]
    return itertools.islice(itertools.chain.from_iterable(zip(*levels, strict=True)), count)
