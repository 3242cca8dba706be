"""The kinds of requests whose answers must not depend on load, with their fields.

What a server computes for a request differs by kind: the best token alone, a few candidates, the whole row,
or log-probabilities too. So most kinds are there with log-probabilities and without.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qwen_serve.bench.load.generator import Job
from qwen_serve.bench.load.prompts import Prompts

LIKELIEST = 3
"""Alternative tokens at each position whose log-probabilities are compared."""
PREFIXES = 3
TURNS = 3
"""Turns of a chat."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["sea", "snow", "sun"]}, "maxItems": 3},
    },
    "required": ["city", "days", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "travel", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "travel"}}
GRAMMAR = (
    'root ::= "{" ws "\\"a\\":" ws [0-9]{1,3} "," ws "\\"b\\":" ws [a-z]{1,12} ws "}"\nws ::= [ \\n]{0,6}'
)

NO_PENALTY = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""A server may have others by default. With them a constrained request needs its whole rows."""
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
DRAWN = {"temperature": 0.8, "top_k": 20, "top_p": 0.95}
BIAS = {"logit_bias": {"271": 4, "13": -6, "220": 2.5}}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: its fields, besides the seed and log-probabilities. ``chat``: with the chat
    template. Without ``scored`` it wants no log-probabilities, and a server may launch its steps ahead."""

    fields: dict[str, Any] = field(default_factory=dict)
    chat: bool = True
    scored: bool = True


KINDS: dict[str, Kind] = {
    "greedy": Kind(chat=False),
    "unscored": Kind({"ignore_eos": True}, chat=False, scored=False),
    "scored prompt": Kind({"prompt_logprobs": 1}, chat=False),
    "seeded": Kind({"temperature": 1.0}),
    "prefix": Kind(),
    "repeats": Kind({"ignore_eos": True}, chat=False),
    "chat": Kind(),
    "seeded chat": Kind(DRAWN),
    "schema": Kind({"temperature": 1.0, "response_format": FORMAT}),
    "thinking": Kind({"chat_template_kwargs": {"enable_thinking": True}}),
    "tools": Kind({"tools": [TOOL], "tool_choice": "required"}),
    "greedy schema": Kind({**NO_PENALTY, "response_format": FORMAT}, scored=False),
    "drawn schema": Kind({**NO_PENALTY, **DRAWN, "response_format": FORMAT}, scored=False),
    "grammar": Kind({**NO_PENALTY, "grammar": GRAMMAR}, chat=False, scored=False),
    "drawn grammar": Kind({**NO_PENALTY, **DRAWN, "grammar": GRAMMAR}, chat=False, scored=False),
    "forced tool": Kind({**NO_PENALTY, "tools": [TOOL], "tool_choice": NAMED}, scored=False),
    "penalties": Kind({**PENALTIES, "ignore_eos": True}, chat=False, scored=False),
    "drawn penalties": Kind({**PENALTIES, **DRAWN}, scored=False),
    "scored penalties": Kind({**PENALTIES, **DRAWN}),
    "schema with penalties": Kind({**PENALTIES, "response_format": FORMAT}, scored=False),
    "bias": Kind({**BIAS, "ignore_eos": True}, chat=False, scored=False),
    "scored bias": Kind({**BIAS, **DRAWN}),
}


async def prefixes_of(made: Prompts, tokens: int, rng: random.Random) -> list[str]:
    """Texts that requests share as their beginning."""
    return [await made.make(tokens, rng) for _ in range(PREFIXES)]


async def job_of(
    name: str, made: Prompts, tokens: int, prefixes: Sequence[str], rng: random.Random, seed: int
) -> Job:
    """A conversation of a kind of ``KINDS``, with up to ``tokens`` tokens a turn."""
    kind = KINDS[name]
    text = await made.make(rng.randint(max(1, tokens // 8), tokens), rng)
    turns: tuple[str, ...] = (text,)
    if name == "prefix":
        turns = (f"{rng.choice(prefixes)}\n\n{text}",)
    elif name == "repeats":
        turns = (f"{text}\n\n{text}",)
    elif name.endswith("chat"):
        turns = (text, *[await made.make(max(1, tokens // 8), rng) for _ in range(TURNS - 1)])
    wanted: dict[str, Any] = {}
    if kind.scored:
        wanted = {"logprobs": True, "top_logprobs": LIKELIEST} if kind.chat else {"logprobs": LIKELIEST}
    return Job(turns, kind.chat, fields={**kind.fields, **wanted, "seed": seed})
