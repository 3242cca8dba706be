"""/tokenize, /detokenize, /apply-template and .../render."""

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
    assert server.post("/detokenize", tokens=ids).json() == {"content": "né 🌍", "prompt": "né 🌍"}
    assert server.post("/detokenize", tokens=ids[:2]).json()["content"] == "n\ufffd"


def test_special_tokens(server: Server) -> None:
    assert server.post("/tokenize", content="<|im_end|>").json()["tokens"] == [258]
    plain = server.post("/tokenize", content="<|im_end|>", parse_special=False, add_special=True)
    assert plain.json()["tokens"] == list(b"<|im_end|>")
    assert server.post("/detokenize", tokens=[104, 258]).json() == {"content": "h", "prompt": "h<|im_end|>"}


def test_pieces(server: Server) -> None:
    pieces = server.post("/tokenize", content="né<|im_end|>", with_pieces=True).json()["tokens"]
    assert pieces == [
        {"id": 110, "piece": "n"},
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
        {"id": 258, "piece": "<|im_end|>"},
    ]


CHATS: list[dict[str, Any]] = [
    {},
    {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"add_generation_prompt": False},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]},
]


@pytest.mark.parametrize("fields", CHATS)
def test_a_conversation_is_counted_as_it_is_answered(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi<|im_end|>"}], **fields}
    answer = server.post("/tokenize", **body).json()
    assert server.chat(**body).status_code == 200
    submission = server.engine.submissions[-1]
    assert answer["tokens"] == submission.prompt
    assert answer["count"] == len(submission.prompt)
    assert server.post("/apply-template", **body).json() == {"prompt": submission.text}
    rendered = server.post("/v1/chat/completions/render", **body).json()
    assert rendered["token_ids"] == submission.prompt
    assert server.post("/detokenize", tokens=answer["tokens"]).json()["prompt"] == submission.text


def test_completions_and_responses_are_rendered(server: Server) -> None:
    rendered = server.post("/v1/completions/render", prompt=["né", [5, 6]]).json()
    assert [each["token_ids"] for each in rendered] == [list("né".encode()), [5, 6]]
    [rendered] = server.post("/v1/completions/render", prompt="abc", truncate_prompt_tokens=2).json()
    assert rendered["token_ids"] == list(b"bc")
    tool = {"type": "function", "name": "look", "parameters": {}}
    body: dict[str, Any] = {"input": "Hi", "instructions": "Be brief.", "tools": [tool]}
    rendered = server.post("/v1/responses/render", **body).json()
    assert server.post("/v1/responses", **body).status_code == 200
    assert rendered["token_ids"] == server.engine.submissions[-1].prompt


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions/render", {}, "messages"),
        ("/v1/completions/render", {"prompt": 5}, "prompt"),
        ("/v1/responses/render", {"input": 5}, "input"),
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "messages[0].role"),
        ("/apply-template", {}, "messages"),
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
        "x", metadata={**FakeEngine(lambda _: "x").metadata, "tokenizer.ggml.padding_token_id": "256"}
    )
    assert server.http.get("/tokenizer_info").json() == {
        "tokenizer_class": None,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "chat_template": TEMPLATE.read_text(encoding="utf-8"),
    }
