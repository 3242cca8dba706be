"""Conversations over HTTP continue from the states of earlier turns in the prefix cache."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import EXACT, served

SYSTEM = "You are a helpful assistant. Answer in one short sentence, and be kind. " * 12
QUESTION = "What is 2+2? Take your time, think about it well, and tell me only what you are sure of. " * 4


@pytest.fixture(scope="module")
def http(nano_f32: Path) -> Iterator[httpx.Client]:
    with served("--model", nano_f32, "--parallel", "4", "--ctx-size", "16384", *EXACT) as client:
        yield client


def turn(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def chat(http: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
    """The reply's text and the usage."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 48, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"] or "", answer.json()["usage"]


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def count(http: httpx.Client, text: str) -> int:
    return len(http.post("/tokenize", json={"content": text}).json()["tokens"])


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def test_the_next_turn_computes_the_last_answer_and_the_new_question_only(http: httpx.Client) -> None:
    messages = [turn("system", SYSTEM), turn("user", QUESTION)]
    reply, first = chat(http, messages)
    messages += [turn("assistant", reply), turn("user", "And what is 3+4?")]
    _, second = chat(http, messages)
    # The template takes the empty think block out of past turns: the paths part behind "assistant\n".
    assert first["prompt_tokens"] - 12 <= cached(second) < first["prompt_tokens"]


def test_tool_results_go_on_from_the_end_of_the_answer(http: httpx.Client) -> None:
    messages = [turn("user", "Repeat after me: the quick brown fox jumps over the lazy dog.")]
    reply, first = chat(http, messages)
    assert count(http, reply) > 16, "an answer this short is not kept"
    messages += [turn("assistant", reply), turn("tool", "14", tool_call_id="1")]
    _, second = chat(http, messages)
    assert cached(second) == first["prompt_tokens"] + count(http, reply)


def test_another_conversation_with_the_same_instructions_begins_behind_them(http: httpx.Client) -> None:
    system = turn("system", "Listen well. " + SYSTEM)
    chat(http, [system, turn("user", "What is 2+2?")])
    _, usage = chat(http, [system, turn("user", "65 + 30 = ?")])
    assert cached(usage) >= count(http, str(system["content"]))


def test_the_same_question_again_computes_the_header_of_the_answer(http: httpx.Client) -> None:
    messages = [turn("user", "Say something about the number 7. " + QUESTION)]
    first_reply, first = chat(http, messages)
    computed = metric(http, "qwen_prefix_tokens_saved_total")
    reply, again = chat(http, messages)
    assert reply == first_reply
    assert cached(first) < first["prompt_tokens"] - 16 < cached(again) < first["prompt_tokens"]
    assert metric(http, "qwen_prefix_tokens_saved_total") - computed == cached(again)


@pytest.mark.slow
def test_thinking_too_gives_what_it_gives_without_the_cache(http: httpx.Client, nano_f32: Path) -> None:
    messages = [turn("system", SYSTEM), turn("user", "What is 17+25?")]
    bodies = [(messages, {"thinking": on}) for on in (True, False, True, False)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda body: chat(http, body[0], **body[1])[0], bodies))
    with served("--model", nano_f32, "--no-prefix-cache", "--ctx-size", "4096", *EXACT) as plain:
        alone = [chat(plain, body[0], **body[1]) for body in bodies]
    assert together == [reply for reply, _ in alone]
    assert [cached(usage) for _, usage in alone] == [0] * 4
