"""The whole server as OpenAI's and Anthropic's own clients meet it; test_conformance.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.serving import EXACT, ServerProcess

FILLER = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def server(nano_f32: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        "--model", nano_f32, "--alias", "nano", "--parallel", "4", "--ctx-size", "16384", *EXACT
    ) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_client_chat(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["nano"]
    question: Any = [{"role": "user", "content": "What is 2+2?"}]
    answer = client.chat.completions.create(model="any", messages=question, max_tokens=64, temperature=0)
    assert answer.choices[0].message.content == "2 + 2 = 4."
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model="any",
            messages=question,
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1


def test_openai_client_thinking(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "What is 17+25?"}],
        max_tokens=256,
        temperature=0,
        reasoning_effort="low",
    )
    message: Any = answer.choices[0].message
    assert message.reasoning_content
    assert message.content.startswith("17 + 25 = ")


def test_openai_client_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="any", prompt=[FILLER, FILLER], n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 1
    stream = client.completions.create(model="any", prompt=FILLER, max_tokens=4, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_anthropic_client(server: ServerProcess) -> None:
    import anthropic  # two seconds, in every process that collects tests

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:

        def shown(message: anthropic.types.Message) -> list[str]:
            return [str(getattr(block, "thinking", getattr(block, "text", ""))) for block in message.content]

        fields: Any = {"model": "any", "max_tokens": 256, "extra_body": {"temperature": 0}}
        question: Any = [{"role": "user", "content": "What is 17+25?"}]
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        whole = client.messages.create(messages=question, thinking=thinking, **fields)
        with client.messages.stream(messages=question, thinking=thinking, **fields) as events:
            streamed = events.get_final_message()
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert whole.content[1].text.startswith("17 + 25 = ")
        assert shown(streamed) == shown(whole)
        total = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        assert streamed.usage.cache_read_input_tokens == total - 1
        counted = client.messages.count_tokens(model="any", messages=question, thinking=thinking)
        assert counted.input_tokens == total
        begun: Any = [
            {"role": "user", "content": "What is 2+2?"},
            {"role": "assistant", "content": "2 + 2 ="},
        ]
        assert client.messages.create(messages=begun, **fields).content[0].text == " 4."


def test_openai_client_responses(client: openai.OpenAI) -> None:
    fields: Any = {
        "model": "any",
        "input": "What is 17+25?",
        "temperature": 0,
        "reasoning": {"effort": "low"},
    }
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as events:
        streamed = events.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output_text.startswith("17 + 25 = ")
    assert streamed.output_text == whole.output_text
    assert whole.usage is not None
    assert streamed.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert streamed.usage.input_tokens_details.cached_tokens == whole.usage.input_tokens - 1


def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="any", prompt="x", max_tokens=0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.InternalServerError, match="embeddings: not supported") as refused:
        client.embeddings.create(model="any", input="x")
    assert refused.value.status_code == 501
