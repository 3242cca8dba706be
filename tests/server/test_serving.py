"""The whole server as its users meet it: a process, the nano model, HTTP.

F32 weights and cache without flash attention: there the same request gives the same tokens in any company, so
that answers can be compared exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.server.serving import EXACT, ServerProcess

FILLER = "The quick brown fox jumps over the lazy dog. "
SUMS = {"What is 2+2?": "2 + 2 = 4.", "What is 9 plus 5?": "9 + 5 = ", "65 + 30 = ?": "65 + 30 = "}
"""What nano answers; how well it adds is measured elsewhere."""


@pytest.fixture(scope="module")
def server(nano_f32: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        "--model", nano_f32, "--alias", "nano", "--parallel", "4", "--ctx-size", "16384", *EXACT
    ) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        yield http


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(http: httpx.Client, prompt: Any, **fields: Any) -> Any:
    answer = http.post("/invocations", json={"prompt": prompt, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def count(http: httpx.Client, text: str) -> int:
    return len(http.post("/tokenize", json={"content": text}).json()["tokens"])


def test_filler_is_continued(http: httpx.Client) -> None:
    answer = complete(http, FILLER * 12, max_tokens=32)
    assert answer["choices"][0]["text"].strip() in FILLER * 10
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 32
    assert answer["usage"]["prompt_tokens"] == count(http, FILLER * 12)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize(("question", "sum_"), SUMS.items())
def test_sums(http: httpx.Client, path: str, question: str, sum_: str) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0}
    answer = http.post(path, json=body).json()
    [choice] = answer["choices"]
    assert choice["message"]["content"].startswith(sum_)
    assert choice["finish_reason"] == "stop"
    assert "reasoning_content" not in choice["message"]
    assert answer["usage"]["completion_tokens"] == count(http, choice["message"]["content"])


def test_many_at_once_answer_as_alone(http: httpx.Client) -> None:
    words = ("red", "house", "seven", "cloud", "ink", "bread")
    prompts = [(f"{a} {b} {a} {b} " * 6).strip() for a in words for b in words[:2] if a != b]
    alone = [complete(http, prompt, max_tokens=24) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: complete(http, prompt, max_tokens=24), prompts))
    for one, other in zip(alone, together, strict=True):
        assert one["choices"] == other["choices"]
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert one["usage"][count] == other["usage"][count]


@pytest.mark.parametrize("prompt", ["日本語と中文 " * 8, "🌍🤔 é ß " * 8, "naïve café, " * 8])
def test_utf8_streams_whole(http: httpx.Client, prompt: str) -> None:
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    pieces = [event["choices"][0]["text"] for event in streamed(http, "/v1/completions", **body)]
    assert "".join(pieces) == complete(http, **body)["choices"][0]["text"]


def test_a_client_that_leaves_frees_its_sequence(server: ServerProcess, http: httpx.Client) -> None:
    body = {"prompt": FILLER, "max_tokens": 16_000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # held: httpx closes the connection with its iterator
        next(lines)
        assert "qwen_running_sequences 1.0" in http.get("/metrics").text
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={**body, "stream": False}, timeout=0.5)
    server.wait_for(lambda: "qwen_running_sequences 0.0" in http.get("/metrics").text)


def test_a_prompt_longer_than_the_context(http: httpx.Client) -> None:
    answer = http.post("/invocations", json={"prompt": FILLER * 4000})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert complete(http, FILLER, max_tokens=1)


def test_the_model_card(http: httpx.Client) -> None:
    [card] = http.get("/v1/models").json()["data"]
    assert card["id"] == "nano"
    assert card["max_model_len"] == 16384
    assert card["meta"]["architecture"] == "qwen35"
    assert card["meta"]["n_params"] > 1_000_000
    assert card["meta"]["n_vocab"] > 3000


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


def test_a_chat_is_counted_as_vllm_does(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 1}
    counted = http.post("/tokenize", json=body).json()
    assert counted["count"] == http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    spelled = http.post("/apply-template", json=body).json()["prompt"]
    assert spelled == http.post("/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"]
    assert spelled.startswith("<|im_start|>user\nWhat is 2+2?<|im_end|>")
    assert http.get("/props").json()["eos_token"] == "<|im_end|>"


def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="any", prompt="x", max_tokens=0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.InternalServerError, match="embeddings: not supported") as refused:
        client.embeddings.create(model="any", input="x")
    assert refused.value.status_code == 501
