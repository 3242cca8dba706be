"""The whole server as OpenAI's own client meets it; test_conformance.py has the rest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.serving import EXACT, ServerProcess


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


def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="any", prompt="x", max_tokens=0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.InternalServerError, match="embeddings: not supported") as refused:
        client.embeddings.create(model="any", input="x")
    assert refused.value.status_code == 501
