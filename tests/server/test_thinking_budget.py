"""Thinking budgets over HTTP, with the fields of all supported APIs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import served

ASK = [{"role": "user", "content": "Tom has 3 boxes of 4 pens and gives 5 away. How many are left?"}]
WORDS = "My time to think is up"


@pytest.fixture(scope="module")
def http(nano_f32: Path) -> Iterator[httpx.Client]:
    with served("--model", nano_f32, "--thinking-budget", "9") as client:
        yield client


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"messages": ASK, "max_tokens": 300, "temperature": 0, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def tokens(http: httpx.Client, text: str) -> int:
    return len(http.post("/tokenize", json={"content": text}).json()["tokens"])


BUDGETS: list[dict[str, Any]] = [  # more spellings: test_conformance.py
    {"thinking_budget": 5},
    {"reasoning": {"max_tokens": 5}},
    {"enable_thinking": True, "thinking_budget": 5},
]


@pytest.mark.parametrize("fields", BUDGETS)
def test_a_budget_closes_the_block_with_a_few_words(http: httpx.Client, fields: dict[str, Any]) -> None:
    message = chat(http, **fields)
    thoughts, bridge, rest = message["reasoning_content"].partition(WORDS)
    assert bridge
    assert "</think>" not in rest + (message["content"] or "")
    assert 1 <= tokens(http, thoughts.strip()) <= 5
    assert message["content"]


def test_other_words_at_the_end_of_a_budget(http: httpx.Client) -> None:
    words = " That is enough.<|im_end|>"  # text throughout
    message = chat(http, thinking_budget=5, reasoning_budget_message=words)
    assert words in message["reasoning_content"]
    assert WORDS not in message["reasoning_content"]
    assert message["content"]
    assert WORDS not in chat(http, thinking_budget=5, reasoning_budget_message="")["reasoning_content"]


def test_the_servers_budget_is_for_those_who_say_nothing(http: httpx.Client) -> None:
    thoughts = chat(http, enable_thinking=True)["reasoning_content"]
    assert tokens(http, thoughts.partition(WORDS)[0].strip()) <= 9
    for fields in ({"thinking_budget": -1}, {"reasoning_effort": "max"}, {"reasoning": {"effort": "high"}}):
        free = chat(http, enable_thinking=True, **fields)["reasoning_content"]
        assert WORDS not in free
        assert free.startswith(thoughts.partition(WORDS)[0].strip())


@pytest.mark.parametrize(
    "fields", [{"thinking_budget": 0}, {"enable_thinking": False, "thinking_budget": 50}]
)
def test_no_thinking(http: httpx.Client, fields: dict[str, Any]) -> None:
    message = chat(http, **fields)
    assert "reasoning_content" not in message
    assert message["content"]


def test_room_is_kept_for_the_answer(http: httpx.Client) -> None:
    for limit in (8, 40, 100):
        message = chat(http, thinking_budget=5000, max_tokens=limit, ignore_eos=True)
        content = message["content"]
        assert content, limit
        assert tokens(http, content) >= limit // 4 - 2


def test_a_budget_and_a_schema(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}}}
    wanted = {**schema, "required": ["n"], "additionalProperties": False}
    for temperature in (0, 1):
        fields = {"guided_json": wanted, "thinking_budget": 5, "temperature": temperature, "seed": 1}
        assert 0 <= json.loads(chat(http, **fields)["content"])["n"] <= 99


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_budget": 3, "reasoning_budget": 4}, "reasoning_budget"),
        ({"reasoning_budget_tokens": 3, "thinking_budget_tokens": 4}, "reasoning_budget_tokens"),
        ({"thinking_budget": 1, "reasoning_budget_message": "x" * 5000}, "reasoning_budget_message"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"thinking_repetition_penalty": 0}, "thinking_repetition_penalty"),
    ],
)
def test_what_makes_no_sense_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": ASK, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "field", ["thinking_budget", "reasoning_budget", "thinking_budget_tokens", "thinking_repetition_penalty"]
)
def test_a_completion_has_no_thoughts_to_limit(http: httpx.Client, field: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "1, 2", field: 5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
