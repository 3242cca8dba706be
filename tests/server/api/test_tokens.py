"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api.conftest import TEMPLATE, Server, Start
from tests.server.api.fakes import FakeEngine
from tests.server.api.test_bad_input import error_of


@pytest.fixture(scope="module")
def server(start_shared: Start) -> Server:
    return start_shared("x")


def test_there_and_back(server: Server) -> None:
    ids = server.post("/tokenize", content="né 🌍").json()["tokens"]
    assert ids == list("né 🌍".encode())
    assert server.post("/detokenize", tokens=ids).json() == {"content": "né 🌍"}
    assert server.post("/detokenize", tokens=ids[:2]).json() == {"content": "n\ufffd"}


def test_special_tokens(server: Server) -> None:
    assert server.post("/tokenize", content="<|im_end|>").json()["tokens"] == [258]
    plain = server.post("/tokenize", content="<|im_end|>", parse_special=False, add_special=True)
    assert plain.json()["tokens"] == list(b"<|im_end|>")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "x", "add_special": "no"}, "add_special"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
    ],
)
def test_bad_input(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(server.post(path, **body), 400)["param"] == param


def test_the_tokenizer_itself(start_shared: Start) -> None:
    server = start_shared(
        "x", metadata={**FakeEngine("x").metadata, "tokenizer.ggml.padding_token_id": "256"}
    )
    assert server.http.get("/tokenizer_info").json() == {
        "tokenizer_class": None,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "chat_template": TEMPLATE.read_text(encoding="utf-8"),
    }
