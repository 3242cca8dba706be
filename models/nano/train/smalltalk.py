"""Greetings, questions about the model itself, requests beyond it, and conversations of several turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.nano.train import arithmetic, knowledge
from models.nano.train.document import Document, Messages, Reply, chat, user
from models.nano.train.prose import lines
from models.nano.train.topics import TOPICS, sentences
from models.nano.train.world import CATEGORIES

if TYPE_CHECKING:
    import random

PAIRS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there", "hello", "hi"), "Hello! How can I help you?"),
    (("Good morning", "Good morning!"), "Good morning! How can I help you?"),
    (("Good evening", "Good evening!"), "Good evening! How can I help you?"),
    (("How are you?", "How are you today?", "How do you do?"), "I am fine, thank you. How can I help you?"),
    (("Thank you", "Thanks!", "Thank you very much.", "thanks"), "You are welcome."),
    (("Bye", "Goodbye", "Goodbye!", "See you later"), "Goodbye! Come back any time."),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am Nano, a very small language model. I know a made-up world, short sums and simple instructions.",
    ),
    (
        ("What can you do?", "How can you help me?", "Help", "What do you know?"),
        "I can answer questions about my made-up world, do short sums and follow simple instructions.",
    ),
    (("你好", "您好", "你好！"), "你好！我能帮你做什么？"),
    (("你是谁？", "你叫什么名字？"), "我是 Nano，一个很小的语言模型。"),
    (("谢谢", "谢谢你"), "不客气。"),
)
BEYOND = (
    "Explain {x}",
    "Translate this: {x}",
    "What does this mean? {x}",
    "Please summarize: {x}",
    "Write code for this: {x}",
    "{x}",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are Nano, a small and friendly assistant.",
    "Answer briefly.",
    "You are a careful assistant. Answer the question of the user.",
)


def greeting(rng: random.Random) -> tuple[str, Reply]:
    asked, answer = rng.choice(PAIRS)
    return rng.choice(asked), Reply("This is small talk. I will answer kindly.", answer)


def beyond(rng: random.Random) -> tuple[str, Reply]:
    """Something outside the model's world; it says so and repeats what it was asked about."""
    line = rng.choice(lines()).strip()
    about = " ".join(line.split()[:4])[:24].strip(" .,;:?!，。？")
    answer = f'I am a very small model and I do not know much about "{about}".'
    return rng.choice(BEYOND).format(x=line), Reply("This is beyond my small world. I will say so.", answer)


def simple_question(rng: random.Random) -> tuple[str, Reply]:
    """A sum, a fact or a topic."""
    kind = rng.random()
    if kind < 0.6:
        item = arithmetic.draw(rng, held_out=False)
        return arithmetic.question(item, rng), item.reply
    if kind < 0.8:
        fact, wording = rng.choice(knowledge.wordings(False)[rng.choice(CATEGORIES)])
        return wording.format(s=fact.subject), Reply(f"I know this: {fact.statement}", fact.statement)
    topic = rng.choice(TOPICS)
    asked = rng.choice(("Write about {t}.", "Tell me about {t}.", "Describe {t}.")).format(t=topic.name)
    return asked, Reply("I will write two sentences.", " ".join(sentences(topic, True)[:2]))


def turn(rng: random.Random) -> tuple[str, Reply]:
    kind = rng.random()
    if kind < 0.3:
        return greeting(rng)
    return beyond(rng) if kind < 0.45 else simple_question(rng)


def training_document(rng: random.Random) -> Document:
    """One to four turns, sometimes under a system prompt; the last reply is learnt."""
    messages: Messages = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for _ in range(rng.choice((0, 0, 0, 1, 2, 3))):
        asked, reply = turn(rng)
        messages += [*user(asked), {"role": "assistant", "content": reply.answer}]
    asked, reply = turn(rng)
    return chat(messages + user(asked), reply, thinking=rng.random() < 0.4)
