"""What training reads: text in segments, each learnt or only read; and how a chat becomes such text."""

from __future__ import annotations

from typing import NamedTuple

Messages = list[dict[str, str]]


class Segment(NamedTuple):
    """A piece of text, tokenised on its own; `learn` puts its tokens into the loss."""

    text: str
    learn: bool


Document = list[Segment]


class Reply(NamedTuple):
    """What the model should say: the thinking (empty when it is off) and the answer."""

    reasoning: str
    answer: str


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def prompt_text(messages: Messages, thinking: bool) -> str:
    """What the chat template renders for plain text messages, up to where the model takes over."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content'].strip()}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n")


def reply_text(reply: Reply, thinking: bool) -> str:
    """What follows `prompt_text`, the end of the turn included."""
    start = f"{reply.reasoning}\n</think>\n\n" if thinking else ""
    return f"{start}{reply.answer}<|im_end|>"


def chat(messages: Messages, reply: Reply, thinking: bool) -> Document:
    return [Segment(prompt_text(messages, thinking), False), Segment(reply_text(reply, thinking), True)]
