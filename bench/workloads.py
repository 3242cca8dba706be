"""What a throughput run sends: independent prompts, questions behind a prefix, growing conversations."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.prompts import Prompts

Body = dict[str, Any]


@dataclass
class Job:
    """One client's errand: its turns are sent one after the other, each with all that was said before."""

    turns: Sequence[str]
    chat: bool
    history: list[Mapping[str, str]] = field(default_factory=list)

    def body(self, turn: int) -> Body:
        """The request of one turn, without the sampling parameters."""
        if not self.chat:
            return {"prompt": self.turns[turn]}
        self.history.append({"role": "user", "content": self.turns[turn]})
        return {"messages": list(self.history)}

    def hear(self, reply: str) -> None:
        """Take the reply into the conversation."""
        if self.chat:
            self.history.append({"role": "assistant", "content": reply})


class Workload(ABC):
    """A kind of traffic. Every call of `jobs` makes texts that no call before has made."""

    name: str
    endpoint: str
    turns = 1

    def __init__(self, prompts: Prompts, input_tokens: int) -> None:
        self.prompts = prompts
        self.input_tokens = input_tokens

    @abstractmethod
    async def jobs(self, requests: int, concurrency: int) -> list[Job]:
        """Jobs of ``requests`` requests in all (chat: whole conversations, at least one a client)."""

    def settings(self) -> dict[str, int | str]:
        """What the result file records of this workload."""
        return {"input_tokens": self.input_tokens, "prompts": self.prompts.source}


class RandomWorkload(Workload):
    """The hackathon's: unrelated prompts of ``input_tokens`` random tokens each."""

    name = "random"
    endpoint = "/v1/completions"

    async def jobs(self, requests: int, concurrency: int) -> list[Job]:
        return [Job([await self.prompts.make(self.input_tokens)], chat=False) for _ in range(requests)]


class SharedPrefixWorkload(Workload):
    """As few-shot benchmarks send it: a long prefix per subject, distinct questions, subject by subject."""

    name = "shared-prefix"
    endpoint = "/v1/chat/completions"

    def __init__(self, prompts: Prompts, input_tokens: int, *, prefix_tokens: int, subjects: int) -> None:
        super().__init__(prompts, input_tokens)
        self.prefix_tokens = prefix_tokens
        self.subjects = subjects

    async def jobs(self, requests: int, concurrency: int) -> list[Job]:
        subjects = min(self.subjects, requests)
        prefixes = [await self.prompts.make(self.prefix_tokens) for _ in range(subjects)]
        return [
            Job(
                [f"{prefixes[index * subjects // requests]}\n\n{await self.prompts.make(self.input_tokens)}"],
                chat=True,
            )
            for index in range(requests)
        ]

    def settings(self) -> dict[str, int | str]:
        return {**super().settings(), "prefix_tokens": self.prefix_tokens, "subjects": self.subjects}


class ChatWorkload(Workload):
    """Conversations of several turns; every turn carries the whole conversation so far."""

    name = "chat"
    endpoint = "/v1/chat/completions"

    def __init__(self, prompts: Prompts, input_tokens: int, *, turns: int) -> None:
        super().__init__(prompts, input_tokens)
        self.turns = turns

    async def jobs(self, requests: int, concurrency: int) -> list[Job]:
        conversations = max(-(-requests // self.turns), concurrency)
        return [
            Job([await self.prompts.make(self.input_tokens) for _ in range(self.turns)], chat=True)
            for _ in range(conversations)
        ]

    def settings(self) -> dict[str, int | str]:
        return {**super().settings(), "turns": self.turns}
