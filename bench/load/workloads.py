"""What a load is made of: independent prompts, questions behind shared prefixes, growing conversations."""

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from bench.load.prompts import Prompts

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """One client's errand: its turns are sent one after the other, each with all that was said before."""

    turns: tuple[str, ...]
    chat: bool


class Workload(ABC):
    """A kind of traffic. The same ``rng`` state makes the same jobs, but for a text that is used up."""

    name: str
    endpoint: str

    def __init__(self, prompts: Prompts, input_tokens: int) -> None:
        self.prompts = prompts
        self.input_tokens = input_tokens

    @abstractmethod
    async def jobs(self, requests: int, clients: int, rng: random.Random) -> list[Job]:
        """Jobs of ``requests`` requests in all (chat: whole conversations, at least one a client)."""


class SinglePrompts(Workload):
    """Unrelated prompts of ``input_tokens`` each: the hackathon's where they are random tokens."""

    endpoint = "/v1/completions"

    def __init__(self, name: str, prompts: Prompts, input_tokens: int) -> None:
        super().__init__(prompts, input_tokens)
        self.name = name

    async def jobs(self, requests: int, clients: int, rng: random.Random) -> list[Job]:
        return [Job((await self.prompts.make(self.input_tokens, rng),), chat=False) for _ in range(requests)]


class SharedPrefix(Workload):
    """As few-shot benchmarks send it: a long prefix per subject, distinct questions, subject by subject."""

    name = "shared-prefix"
    endpoint = "/v1/chat/completions"

    def __init__(self, prompts: Prompts, input_tokens: int, *, prefix_tokens: int, prefixes: int) -> None:
        super().__init__(prompts, input_tokens)
        self.prefix_tokens = prefix_tokens
        self.prefixes = prefixes

    async def jobs(self, requests: int, clients: int, rng: random.Random) -> list[Job]:
        count = min(self.prefixes, requests)
        prefixes = [await self.prompts.make(self.prefix_tokens, rng) for _ in range(count)]
        questions = [await self.prompts.make(self.input_tokens, rng) for _ in range(requests)]
        return [
            Job((f"{prefixes[index * count // requests]}\n\n{question}",), chat=True)
            for index, question in enumerate(questions)
        ]


class Chat(Workload):
    """Conversations of several turns; every turn carries the whole conversation so far."""

    name = "chat"
    endpoint = "/v1/chat/completions"

    def __init__(self, prompts: Prompts, input_tokens: int, *, turns: int) -> None:
        super().__init__(prompts, input_tokens)
        self.turns = turns

    async def jobs(self, requests: int, clients: int, rng: random.Random) -> list[Job]:
        conversations = max(-(-requests // self.turns), clients)
        return [
            Job(
                tuple([await self.prompts.make(self.input_tokens, rng) for _ in range(self.turns)]), chat=True
            )
            for _ in range(conversations)
        ]
