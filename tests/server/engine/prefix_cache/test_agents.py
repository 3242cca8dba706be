"""Requests of agents, through the model's template: only the rewritten part of a prompt is computed again."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from qwen_serve.server.chat import Prompter
from qwen_serve.server.engine import Vocab
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.prefix_cache.cache import MIN_GAIN
from qwen_serve.server.engine.request import Request
from qwen_serve.server.engine.verification import SampleResult
from tests.marks import slow_but
from tests.server.api.fakes import ADDED, FakeVocab
from tests.server.engine.prefix_cache.world import World
from tests.server.engine.scheduling import NO_SAMPLER

TEMPLATE = Path(__file__).parents[4] / "chat_templates" / "qwen3_5.jinja"
ROLES = {"user": 400, "assistant": 401, "system": 402}

SLACK = 64
"""Bytes, which are tokens here, from a place where somebody may part to the checkpoint before it: a turn's
header, and what lies less than a checkpoint's least gain behind another."""


class WordVocab(FakeVocab):
    """A vocabulary in which roles are tokens, unlike in one of bytes."""

    def tokenize(
        self, text: str, *, special: bool, check: Callable[[int], None] = lambda _: None
    ) -> list[int]:
        ids: list[int] = []
        for piece in re.split("(user|assistant|system)", text):
            role = ROLES.get(piece)
            ids += super().tokenize(piece, special=special, check=check) if role is None else [role]
        return ids


class ScriptedWorld(World):
    """A world whose model gives scripted answers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.script: dict[Request, list[int]] = {}

    def answer(self, prompt: list[int], tokens: list[int]) -> Request:
        """Run one request alone, to its end."""
        sequence = Request(list(prompt), len(tokens), NO_SAMPLER)
        self.script[sequence] = tokens
        self.scheduler.add(sequence)
        self.finish()
        return sequence

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        for chunk in batch.chunks:
            held = self.context.held.get(chunk.slot, ())
            assert held == tuple(chunk.sequence.tokens[: chunk.start])
            end = chunk.start + chunk.count
            self.context.held[chunk.slot] = (*held, *chunk.sequence.tokens[len(held) : end])
        self.scheduler.launched(batch)
        results = [
            SampleResult([self.script[chunk.sequence][chunk.sequence.generated]] if chunk.samples else [])
            for chunk in batch.chunks
        ]
        self.scheduler.commit(batch, results, [chunk.start + chunk.count for chunk in batch.chunks])
        self.check()
        return batch


@dataclass
class Agent:
    """An agent that asks, calls tools, and keeps its history as clients do, with or without reasoning."""

    rng: random.Random
    keeps_reasoning: bool
    ids: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)
    lost: int = 0
    """Tokens that were computed again though an earlier request had begun with them."""

    def __post_init__(self) -> None:
        vocab = WordVocab()
        self.vocab = vocab
        self.prompter = Prompter(cast("Vocab", vocab), TEMPLATE.read_text(encoding="utf-8"))
        self.world = ScriptedWorld(
            ids=self.ids,
            total_cells=200_000,
            batch=2048,
            budget=2048,
            max_cells=100_000,
            turn_ids=[256 + ADDED.index("<|im_start|>")],
            tool_ids=[256 + ADDED.index("<tool_response>")],
        )
        self.messages = [{"role": "system", "content": self.text(900)}]

    def text(self, length: int) -> str:
        return "".join(self.rng.choice("abcdefghij klmnop") for _ in range(length)).strip()

    def ask(self, messages: list[dict[str, Any]]) -> tuple[int, int]:
        """(cached tokens, tokens that the prompt shares with the beginning of an earlier request)."""
        prompt = self.prompter.chat(messages, enable_thinking=True)
        reasoning, text = self.text(200), self.text(60)
        answer = f"{reasoning}\n</think>\n\n{text}"
        reply: dict[str, Any] = {"role": "assistant", "content": text}
        if self.keeps_reasoning:
            reply["reasoning_content"] = reasoning
        tokens = [*self.vocab.tokenize(answer, special=True), self.vocab.eos_id]
        known = max((_common(prompt[:-1], earlier) for earlier in self.seen), default=0)
        cached = self.world.answer(prompt, tokens).reused or 0
        self.seen.append([*prompt, *tokens[:-1]])
        self.reply = reply
        self.lost = max(self.lost, known - cached)
        return cached, known

    def question(self, steps: int) -> None:
        """A question, `calls` tool calls, and the answer."""
        self.messages.append({"role": "user", "content": self.text(80)})
        for _ in range(steps):
            self.ask(self.messages)
            self.messages += [self.reply, {"role": "tool", "content": self.text(300)}]
        self.ask(self.messages)
        self.messages.append(self.reply)


def _common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("ids", [8, 32])
@pytest.mark.parametrize("steps", slow_but([0, 3], [0, 3, 12]))
@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_rewritten_is_all_that_is_read_again(keeps: bool, steps: int, ids: int) -> None:
    agent = Agent(random.Random(1), keeps, ids)
    for _ in range(3):
        agent.question(steps)
    assert agent.lost <= SLACK
    last = max(n for n, message in enumerate(agent.messages) if message["role"] == "user")
    for length in (80, 40):  # edited, and edited again
        edited = [*agent.messages[:last], {"role": "user", "content": agent.text(length)}]
        cached, known = agent.ask(edited)
        assert cached >= known - SLACK
        assert known > 900
    cached, known = agent.ask(edited)  # another answer to the same
    assert cached > known - MIN_GAIN


def test_a_nonce_costs_what_follows_it() -> None:
    agent = Agent(random.Random(2), keeps_reasoning=True, ids=32)
    instructions = agent.messages[0]["content"]
    for number in range(4):
        agent.messages[0] = {"role": "system", "content": f"{instructions} cch={number};"}
        agent.question(0)
    agent.messages[0] = {"role": "system", "content": f"{instructions} cch=9;"}
    cached, known = agent.ask([agent.messages[0], {"role": "user", "content": "Hi"}])
    assert cached == known > 900


def test_in_one_conversation_beside_others_the_instructions_stay() -> None:
    """What every step of a loop will be wanted for is not driven out by the steps."""
    agents = [Agent(random.Random(n), keeps_reasoning=False, ids=32) for n in range(2)]
    agents[1].world, agents[1].messages = agents[0].world, list(agents[0].messages)
    for agent in agents:
        agent.question(6)
    for agent in agents:
        agent.question(1)
        assert agent.lost <= SLACK
