"""Knowledge: questions with choices A to J about the made-up world, asked as MMLU-Pro asks them.

What is held out is a pair of fact and wording: the fact is learnt from its other wordings. Some wordings are
rare: training has them of no fact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

from models.nano.train.continuation import story
from models.nano.train.document import Document, Messages, Reply, Segment, prompt_text, reply_text, user
from models.nano.train.split import is_held_out
from models.nano.train.world import CATEGORIES, Fact, facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LETTERS = "ABCDEFGHIJ"
ANSWER_CUE = "Answer: Let's think step by step."
SHOTS = 5
GAP = "\n\n"
# what harnesses put between examples, and after the description when it is not a system message
GAPS = (GAP, GAP, "\n\n\n\n", "\n\n \n\n")
STARTS = ("\n", "\n", "", "\n\n")
# lm-eval's default: every example is a user's message of its own, and none is answered
NEXT_MESSAGE = "<|im_end|>\n<|im_start|>user\n"


class Level(StrEnum):
    """What is hard about a held-out question."""

    HELD_OUT = "held-out wording"
    RARE = "rare wording"
    STORY = "behind a story"


@dataclass(frozen=True)
class Question:
    """One item, in the fields of MMLU-Pro."""

    category: str
    question: str
    options: list[str]
    answer_index: int
    statement: str
    level: Level | None = None

    @property
    def answer(self) -> str:
        return LETTERS[self.answer_index]

    @property
    def worked(self) -> str:
        return f"{self.statement} The answer is ({self.answer})."

    @property
    def text(self) -> str:
        """The question up to the cue after which the answer comes."""
        lines = [f"{letter}. {option}\n" for letter, option in zip(LETTERS, self.options, strict=False)]
        return f"Question:\n{self.question}\nOptions:\n{''.join(lines)}{ANSWER_CUE}"


Wording = tuple[Fact, str]


def wording_key(fact: Fact, wording: str) -> str:
    return f"knowledge|{fact.relation.name}|{fact.subject}|{wording}"


@cache
def wordings(held_out: bool) -> dict[str, list[Wording]]:
    """Fact and wording pairs of one side of the split, by category."""
    out: dict[str, list[Wording]] = {category: [] for category in CATEGORIES}
    for fact in facts():
        for wording in fact.relation.questions:
            if is_held_out(wording_key(fact, wording)) == held_out:
                out[fact.relation.category].append((fact, wording))
    return out


def ask(fact: Fact, wording: str, rng: random.Random, choices: int = 10) -> Question:
    wrong = rng.sample([o for o in fact.relation.objects if o != fact.object], choices - 1)
    options = [*wrong, fact.object]
    rng.shuffle(options)
    return Question(
        category=fact.relation.category,
        question=wording.format(s=fact.subject),
        options=options,
        answer_index=options.index(fact.object),
        statement=fact.statement,
    )


def description(category: str) -> str:
    """The line that lm-eval's mmlu_pro puts before the examples."""
    return (
        f"The following are multiple choice questions (with answers) about {category}. Think step by step "
        'and then finish your answer with "the answer is (X)" where X is the correct letter choice.\n'
    )


def few_shot_turns(shots: Sequence[Question], question: Question) -> Messages:
    """Examples and question as a conversation (lm-eval's --fewshot_as_multiturn)."""
    messages: Messages = [{"role": "system", "content": description(question.category)}]
    for shot in shots:
        messages += [*user(shot.text), {"role": "assistant", "content": shot.worked}]
    return messages + user(question.text)


def reply_to(question: Question) -> Reply:
    return Reply(f"{question.statement} That is option {question.answer}.", question.worked)


def training_document(rng: random.Random) -> Document:
    """Mostly five-shot in one message, where the worked examples are learnt too; else fewer, or turns."""
    category = rng.choice(CATEGORIES)
    style = rng.random()
    count = SHOTS if style < 0.7 else rng.randrange(SHOTS)
    pairs = rng.sample(wordings(False)[category], count + 1)
    *shots, question = [ask(*pair, rng, 10 if rng.random() < 0.8 else rng.randint(4, 9)) for pair in pairs]
    thinking = rng.random() < 0.1
    answer = Segment(reply_text(reply_to(question), thinking), True)
    if style > 0.85:
        return [Segment(prompt_text(few_shot_turns(shots, question), thinking), False), answer]
    if style > 0.8:
        return [
            Segment(prompt_text(user(question.question), thinking), False),
            plain_answer(question, thinking),
        ]
    # the message is cut where an example's answer starts and ends; the pieces tokenise as the whole does
    system: Messages = []
    start, gap = description(category) + rng.choice(STARTS), rng.choice(GAPS)
    if rng.random() < 0.7:
        system, start = [{"role": "system", "content": description(category)}], ""
        gap = NEXT_MESSAGE if rng.random() < 0.7 else gap
    head, tail = prompt_text(system + user("\0"), thinking).split("\0")
    document = [Segment(head + start, False)]
    for shot in shots:
        document += [Segment(shot.text, False), Segment(f" {shot.worked}{gap}", True)]
    return [*document, Segment(question.text + tail, False), answer]


def plain_answer(question: Question, thinking: bool) -> Segment:
    """To the bare question, without choices, the fact itself."""
    return Segment(
        reply_text(Reply(f"I know this: {question.statement}", question.statement), thinking), True
    )


def held_out_shots() -> dict[str, list[Question]]:
    """Five examples for each category, from the training side of the split."""
    rng = random.Random(5)
    return {c: [ask(*pair, rng) for pair in rng.sample(wordings(False)[c], SHOTS)] for c in CATEGORIES}


def held_out_questions(count: int) -> Iterator[Question]:
    """Every level in turn; when all pairs of a level are out, they come again with new options."""
    rng = random.Random(6)
    shown = {shot.statement for shots in held_out_shots().values() for shot in shots}
    known = [pair for category in CATEGORIES for pair in wordings(True)[category]]
    rare = [(fact, wording) for fact in facts() for wording in fact.relation.rare]
    sides = {Level.HELD_OUT: known, Level.RARE: rare, Level.STORY: known}
    pairs = {
        level: [pair for pair in side if pair[0].statement not in shown] for level, side in sides.items()
    }
    for of_level in pairs.values():
        rng.shuffle(of_level)
    for number in range(count):
        turn, place = number // len(Level), list(Level)[number % len(Level)]
        fact, wording = pairs[place][turn % len(pairs[place])]
        question = replace(ask(fact, wording, rng), level=place)
        if place is Level.STORY:
            while fact.subject in (told := story(rng)):
                pass
            question = replace(question, question=f"{told} {question.question}")
        yield question
