"""Ollama's Python client with a model."""

import json
from typing import Any

import ollama
import pytest

from tests.server.seeing import encoded, needs_vision, noise
from tests.server.serving import Served

pytestmark = needs_vision

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"country": {"enum": ["France", "Japan"]}, "capital": {"type": "boolean"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}


@pytest.fixture
def client(seeing: Served) -> ollama.Client:
    return ollama.Client(host=seeing.url, timeout=120)


def test_a_schema_is_kept_to(client: ollama.Client) -> None:
    ask = [{"role": "user", "content": "Tell me about Paris."}]
    options = {"num_predict": 200}
    whole = client.chat("nano", ask, format=CITY, options=options, think=False)
    assert json.loads(whole.message.content or "").keys() == CITY["properties"].keys()
    *parts, last = client.chat("nano", ask, format=CITY, options=options, think=False, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert last.eval_count == whole.eval_count
    assert last.prompt_eval_count == whole.prompt_eval_count


def test_thoughts_come_apart(client: ollama.Client) -> None:
    answer = client.generate("nano", "What is 2+2?", think=True, options={"num_predict": 300})
    assert answer.thinking
    assert "</think>" not in (answer.response or "")
    assert answer.eval_duration


def test_a_picture_is_seen(client: ollama.Client) -> None:
    picture = encoded(noise(1))
    told = [
        client.generate("nano", "What is this?", images=images, think=False, options={"num_predict": 4})
        for images in ([picture], [])
    ]
    assert (told[0].prompt_eval_count or 0) > (told[1].prompt_eval_count or 0)
    assert "vision" in (client.show("nano").capabilities or ())
