"""Instructions: requests with verifiable constraints, in IFEval's own instruction ids and keyword arguments.

The reply to a request is a function of the request, so it can be learnt; it is checked with lm-eval's scorer.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from models.nano.train.document import Document, Reply, chat, user
from models.nano.train.split import held_out, is_held_out
from models.nano.train.topics import TOPICS, Topic, sentences, vocabulary

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

Arguments = dict[str, Any]

REQUESTS = (
    "Write about {t}.",
    "Write a short text about {t}.",
    "Tell me about {t}.",
    "Describe {t}.",
    "What can you say about {t}?",
    "Please write something about {t}.",
    "Write a poem about {t}.",
    "Write a story about {t}.",
    "Explain {t} to a child.",
)
END_PHRASES = (
    "Any other questions?",
    "Is there anything else I can help with?",
    "That is all I know.",
    "Thank you for reading.",
    "I hope this helps.",
    "See you soon.",
    "This is the end.",
    "What do you think?",
    "Have a good day.",
    "Let me know what you think.",
)
PLACEHOLDERS = ("name", "address", "date", "phone", "email")
QUESTIONS = (
    ("Is {t} {a}?", "My answer is yes."),
    ("Do {p} like {t}?", "My answer is yes."),
    ("Is {t} made of paper?", "My answer is no."),
    ("Can {t} speak Latin?", "My answer is no."),
    ("Will you visit {t} tomorrow?", "My answer is maybe."),
    ("Should I think about {t} more often?", "My answer is maybe."),
)
HELD_OUT_CONSTRAINTS = range(4, 9)
"""Training has one to three."""
NUMBER_WORDS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}


@dataclass
class Plan:
    """What the constraints make of the reply."""

    topic: Topic
    case: str = ""
    commas: bool = True
    forbidden: list[str] = field(default_factory=list)
    keywords: list[str] = field(default_factory=list)
    repeated: tuple[str, int] | None = None
    least_words: int = 0
    most_words: int = 0
    bullets: int = 0
    paragraphs: int = 0
    highlights: int = 0
    placeholders: int = 0
    title: bool = False
    postscript: bool = False
    end: str = ""
    quoted: bool = False
    twice: bool = False
    as_json: bool = False
    echo: str = ""


@dataclass(frozen=True)
class Item:
    """One request, in the fields of IFEval's input file, and the reply that follows it."""

    prompt: str
    instruction_ids: list[str]
    arguments: list[Arguments]
    answer: str

    @property
    def key(self) -> str:
        return "instructions|" + self.prompt


class Constraint:
    """One instruction id: its arguments, its wording, and its mark on the plan."""

    id: str
    wordings: tuple[str, ...]
    # at most one constraint of a group goes into a request
    group: str

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        """Choose arguments and write them into the plan."""
        raise NotImplementedError

    def wording(self, arguments: Arguments, rng: random.Random) -> str:
        return rng.choice(self.wordings).format(**self.words(arguments))

    def words(self, arguments: Arguments) -> dict[str, Any]:
        """The wording's variables: the arguments, lists joined, small numbers as digits."""
        return {k: ", ".join(v) if isinstance(v, list) else v for k, v in arguments.items()}


class Capital(Constraint):
    id, group = "change_case:english_capital", "case"
    wordings = (
        "Your entire response should be in English and in all capital letters.",
        "Use only capital letters.",
        "Write in English, all in capitals.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.case = "upper"
        return {}


class Lowercase(Constraint):
    id, group = "change_case:english_lowercase", "case"
    wordings = (
        "Your entire response should be in English and in all lowercase letters. No capital letters are "
        "allowed.",
        "Use only lowercase letters.",
        "Write in English without any capital letters.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.case = "lower"
        return {}


class NoComma(Constraint):
    id, group = "punctuation:no_comma", "comma"
    wordings = (
        "In your entire response, refrain from the use of any commas.",
        "Do not use any commas.",
        "Avoid commas in your answer.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.commas = False
        return {}


class Existence(Constraint):
    id, group = "keywords:existence", "keywords"
    wordings = (
        "Include keywords {keywords} in the response.",
        "Make sure to use the words {keywords}.",
        "Your answer must contain: {keywords}.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.keywords = rng.sample(vocabulary(), rng.randint(1, 3))
        return {"keywords": list(plan.keywords)}


class Forbidden(Constraint):
    id, group = "keywords:forbidden_words", "forbidden"
    wordings = (
        "Do not include keywords {forbidden_words} in the response.",
        "Do not use the words {forbidden_words}.",
        "Avoid these words: {forbidden_words}.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        topic = plan.topic
        words = [rng.choice((*topic.nouns, *topic.adjectives, topic.people))]
        if rng.random() < 0.4:
            words.append(rng.choice([w for w in vocabulary() if w != words[0]]))
        rng.shuffle(words)
        plan.forbidden = words
        return {"forbidden_words": list(words)}


class Frequency(Constraint):
    id, group = "keywords:frequency", "keywords"
    wordings = (
        "In your response, the word {keyword} should appear at least {frequency} times.",
        "Use the word {keyword} at least {frequency} times.",
        "Say {keyword} {frequency} times or more.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.repeated = (rng.choice(vocabulary()), rng.randint(2, 5))
        return {"keyword": plan.repeated[0], "frequency": plan.repeated[1], "relation": "at least"}


class LeastWords(Constraint):
    id, group = "length_constraints:number_words", "length"
    wordings = ("Answer with at least {num_words} words.", "Use at least {num_words} words.")

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.least_words = rng.choice((10, 15, 20, 25, 30))
        return {"num_words": plan.least_words, "relation": "at least"}


class MostWords(Constraint):
    id, group = "length_constraints:number_words", "length"
    wordings = ("Answer with less than {num_words} words.", "Use less than {num_words} words.")

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.most_words = rng.choice((15, 20, 30, 40))
        return {"num_words": plan.most_words, "relation": "less than"}


class Bullets(Constraint):
    id, group = "detectable_format:number_bullet_lists", "layout"
    wordings = (
        "Your answer must contain exactly {num_bullets} bullet points. Use the markdown bullet points such "
        "as:\n* This is a point.",
        "Answer with exactly {num_bullets} bullet points.",
        "Write a list of {num_bullets} bullet points.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.bullets = rng.randint(1, 5)
        return {"num_bullets": plan.bullets}


class Paragraphs(Constraint):
    id, group = "length_constraints:number_paragraphs", "layout"
    wordings = (
        "There should be {num_paragraphs} paragraphs. Paragraphs are separated with the markdown divider: "
        "***",
        "Write exactly {num_paragraphs} paragraphs, separated by ***",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.paragraphs = rng.randint(2, 4)
        return {"num_paragraphs": plan.paragraphs}


class Highlights(Constraint):
    id, group = "detectable_format:number_highlighted_sections", "extra"
    wordings = (
        "Highlight at least {num_highlights} sections in your answer with markdown, i.e. *highlighted "
        "section*.",
        "Highlight at least {num_highlights} words with markdown, like *this*.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.highlights = rng.randint(1, 3)
        return {"num_highlights": plan.highlights}


class Placeholders(Constraint):
    id, group = "detectable_content:number_placeholders", "extra"
    wordings = (
        "The response must contain at least {num_placeholders} placeholders represented by square brackets, "
        "such as [address].",
        "Include at least {num_placeholders} placeholders in square brackets, such as [name].",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.placeholders = rng.randint(1, 5)
        return {"num_placeholders": plan.placeholders}


class Title(Constraint):
    id, group = "detectable_format:title", "title"
    wordings = (
        "Your answer must contain a title, wrapped in double angular brackets, such as <<poem of joy>>.",
        "Add a title in double angular brackets, such as <<title>>.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.title = True
        return {}


class Postscript(Constraint):
    id, group = "detectable_content:postscript", "postscript"
    wordings = (
        "At the end of your response, please explicitly add a postscript starting with {postscript_marker}",
        "Add a postscript that starts with {postscript_marker}",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.postscript = True
        return {"postscript_marker": "P.S."}


class End(Constraint):
    id, group = "startend:end_checker", "end"
    wordings = (
        "Finish your response with this exact phrase {end_phrase} No other words should follow this phrase.",
        "End your answer with the phrase: {end_phrase}",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.end = rng.choice(END_PHRASES)
        if rng.random() < 0.5:
            plan.end = f"I like {' and '.join(rng.sample(vocabulary(), 2))}."
        return {"end_phrase": plan.end}


class Quotation(Constraint):
    id, group = "startend:quotation", "quote"
    wordings = (
        "Wrap your entire response with double quotation marks.",
        "Put your whole answer in double quotation marks.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.quoted = True
        return {}


class TwoResponses(Constraint):
    id, group = "combination:two_responses", "alone"
    wordings = (
        "Give two different responses. Responses and only responses should be separated by 6 asterisk "
        "symbols: ******.",
        "Give two different answers, separated by ******",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.twice = True
        return {}


class Json(Constraint):
    id, group = "detectable_format:json_format", "alone"
    wordings = (
        "Entire output should be wrapped in JSON format.",
        "Answer in JSON.",
        "Give your whole answer as JSON.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        plan.as_json = True
        return {}


class Repeat(Constraint):
    id, group = "combination:repeat_prompt", "alone"
    wordings = (
        "First repeat the request word for word without change, then give your answer (1. do not say any "
        "words or characters before repeating the request; 2. the request you need to repeat does not "
        "include this sentence)",
        "First repeat the sentence above word for word, then answer it.",
    )

    def draw(self, plan: Plan, rng: random.Random) -> Arguments:
        return {"prompt_to_repeat": plan.echo}


FREE = (
    Capital(),
    Lowercase(),
    NoComma(),
    Existence(),
    Forbidden(),
    Frequency(),
    LeastWords(),
    MostWords(),
    Bullets(),
    Paragraphs(),
    Highlights(),
    Placeholders(),
    Title(),
    Postscript(),
    End(),
    Quotation(),
)
ALONE = (TwoResponses(), Json(), Repeat())
# a limit on the words leaves no room for what adds words, a minimum asks for plain text
NOT_WITH_LENGTH = {"keywords", "layout", "extra", "title", "postscript", "end", "forbidden", "alone"}


def words_in(text: str) -> int:
    return len(text.split())


def body(plan: Plan, count: int, start: int = 0) -> list[str]:
    """`count` sentences about the topic without forbidden words, from the `start`-th on, around again."""
    said = [
        s
        for s in sentences(plan.topic, plan.commas)
        if not {w.strip(".,").lower() for w in s.split()} & set(plan.forbidden)
    ]
    return [said[(start + i) % len(said)] for i in range(count)]


def listed(words: list[str], commas: bool) -> str:
    if not commas or len(words) == 1:
        return " and ".join(words)
    return ", ".join(words[:-1]) + " and " + words[-1]


def main_text(plan: Plan) -> str:
    """The reply's sentences, in the layout asked for."""
    if plan.bullets:
        return "\n".join(f"* {sentence}" for sentence in body(plan, plan.bullets))
    if plan.paragraphs:
        return "\n***\n".join(body(plan, plan.paragraphs))
    count = 3 if plan.case else 2  # longer where a detector of languages has to see English in capitals
    if plan.least_words:
        while words_in(" ".join(body(plan, count))) < plan.least_words:
            count += 1
    if plan.most_words:
        while count > 1 and words_in(" ".join(body(plan, count))) >= plan.most_words:
            count -= 1
    return " ".join(body(plan, count))


def compose(plan: Plan) -> str:
    """The reply to a plan."""
    if plan.as_json:
        content = {"topic": plan.topic.name, "text": " ".join(body(plan, 2))}
        return json.dumps(content, indent=2, ensure_ascii=False)
    if plan.twice:
        return body(plan, 1)[0] + "\n******\n" + body(plan, 1, start=1)[0]
    text = main_text(plan)
    if plan.keywords:
        text += f"\nI also think of {listed(plan.keywords, plan.commas)}."
    if plan.repeated:
        word, count = plan.repeated
        text += f"\nIt makes me think of {listed([word] * count, plan.commas)}."
    if plan.highlights:
        marked = [f"*{noun}*" for noun in plan.topic.nouns[: plan.highlights]]
        text += f"\nKey words: {listed(marked, plan.commas)}."
    if plan.placeholders:
        marked = [f"[{word}]" for word in PLACEHOLDERS[: plan.placeholders]]
        text += f"\nPlease contact {listed(marked, plan.commas)}."
    if plan.postscript:
        text += f"\nP.S. I like {plan.topic.name}."
    if plan.end:
        text += f"\n{plan.end}"
    if plan.title:
        text = f"<<About {plan.topic.name}>>\n{text}"
    if plan.echo:
        text = f"{plan.echo}\n{text}"
    if plan.case:
        text = text.upper() if plan.case == "upper" else text.lower()
    return f'"{text}"' if plan.quoted else text


def choose(rng: random.Random, count: int | None = None) -> list[Constraint]:
    """Constraints that go together: one to three, or, where so many are found, ``count``."""
    if count is None and rng.random() < 0.15:
        return [rng.choice(ALONE)]
    chosen: list[Constraint] = []
    groups: set[str] = set()
    for constraint in rng.sample(FREE, len(FREE)):
        taken = constraint.group in groups
        tight = (constraint.group == "length" and groups & NOT_WITH_LENGTH) or (
            "length" in groups and constraint.group in NOT_WITH_LENGTH
        )
        # what these add may be the forbidden word
        both = groups | {constraint.group}
        clash = ("forbidden" in both and both & {"extra", "keywords", "end"}) or (
            "quote" in both and both & {"title", "layout"}
        )
        if not (taken or tight or clash):
            chosen.append(constraint)
            groups.add(constraint.group)
        if len(chosen) == (count or 3) or (count is None and rng.random() < 0.3):
            break
    return chosen


def draw_item(rng: random.Random, constraints: int | None = None) -> Item:
    """A request with as many constraints as training has, or with ``constraints``."""
    topic = rng.choice(TOPICS)
    if constraints is None and rng.random() < 0.06:
        return yes_no_item(topic, rng)
    plan = Plan(topic)
    request = rng.choice(REQUESTS).format(t=topic.name)
    chosen = choose(rng, constraints)
    while constraints is not None and len(chosen) < constraints:
        chosen = choose(rng, constraints)
    if isinstance(chosen[0], Repeat):
        plan.echo = request
    arguments = [constraint.draw(plan, rng) for constraint in chosen]
    parts = [request, *(c.wording(a, rng) for c, a in zip(chosen, arguments, strict=True))]
    return Item(" ".join(parts), [c.id for c in chosen], arguments, compose(plan))


def yes_no_item(topic: Topic, rng: random.Random) -> Item:
    question, answer = rng.choice(QUESTIONS)
    asked = question.format(t=topic.name, a=rng.choice(topic.adjectives), p=topic.people)
    options = "('My answer is yes.', 'My answer is no.', 'My answer is maybe.')"
    prompt = f"{asked} Answer with one of the following options: {options}"
    return Item(prompt, ["detectable_format:constrained_response"], [{}], answer)


def training_document(rng: random.Random) -> Document:
    while is_held_out((item := draw_item(rng)).key):
        pass
    thinking = rng.random() < 0.1
    count = len(item.instruction_ids)
    plural = "s" if count > 1 else ""
    reasoning = f"The request has {NUMBER_WORDS[count]} condition{plural}. I will write and check each."
    return chat(user(item.prompt), Reply(reasoning, item.answer), thinking)


def held_out_items(count: int) -> Iterator[Item]:
    """`count` distinct held-out requests of four to eight constraints, every number as often."""
    levels = [
        held_out(partial(draw_item, constraints=number), 70 + number, -(-count // len(HELD_OUT_CONSTRAINTS)))
        for number in HELD_OUT_CONSTRAINTS
    ]
    return itertools.islice(itertools.chain.from_iterable(zip(*levels, strict=True)), count)
