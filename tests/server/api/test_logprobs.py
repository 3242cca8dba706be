"""Log-probabilities in all formats, with and without streaming."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pydantic_core
import pytest

from qwen_serve.server.api.logprobs import TokenNames
from qwen_serve.server.api.sse import Lazily, Written, encode
from tests.messages import user
from tests.server.api.conftest import Start
from tests.server.api.formats.test_completions import events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [user("Hi")]


def entry(byte: int, logprob: float) -> dict[str, Any]:
    return {"token": bytes([byte]).decode("utf-8", "replace"), "logprob": logprob, "bytes": [byte]}


@pytest.mark.parametrize("stop", [None, "x"])
def test_an_answer_without_tokens_has_an_empty_list(start: Start, stop: str | None) -> None:
    """Clients read `logprobs.content` of what they asked for."""
    choice = start("" if stop is None else stop).chat(logprobs=True, stop=stop).json()["choices"][0]
    assert choice["logprobs"] == {"content": [], "refusal": None}


def test_of_a_chat(start: Start) -> None:
    [choice] = start("bc").chat(logprobs=True, top_logprobs=2).json()["choices"]
    tops = [entry(98, -0.1), entry(99, -2.5)]
    assert choice["logprobs"] == {
        "content": [{**entry(98, -0.1), "top_logprobs": tops}, {**entry(99, -2.5), "top_logprobs": tops}],
        "refusal": None,
    }


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 0}, {"top_logprobs": None}])
def test_of_a_chat_without_alternatives(start: Start, fields: dict[str, Any]) -> None:
    server = start("b")
    told = server.chat(logprobs=True, **fields).json()["choices"][0]["logprobs"]
    assert told == {"content": [{**entry(98, -0.1), "top_logprobs": []}], "refusal": None}
    assert server.engine.submissions[0].params.logprobs == 0
    assert server.chat(logprobs=False, **fields).json()["choices"][0]["logprobs"] is None
    assert server.engine.submissions[1].params.logprobs is None


@pytest.mark.parametrize("stop", [None, "l", "lo w"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1}),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1, "thinking": True, "n": 2}),
        (CHAT, {"messages": HI, "n_probs": 1}),
        (COMPLETIONS, {"prompt": "xy", "logprobs": 1, "n": 2}),
        (COMPLETIONS, {"prompt": "é<|im_end|>", "logprobs": 1, "echo": True}),
        (COMPLETIONS, {"prompt": ["xy", [97, 262, 263]], "logprobs": 2, "echo": True}),
        (COMPLETIONS, {"prompt": "xy", "n_probs": 1}),
    ],
)
def test_streamed_as_whole(start_shared: Start, path: str, body: dict[str, Any], stop: str | None) -> None:
    server = start_shared("é hel</think>lo wörld")
    whole = server.post(path, **body, stop=stop).json()
    streamed: list[dict[str, Any]] = [{} for _ in whole["choices"]]
    for event in events(server, path, **body, stop=stop)[:-1]:
        for choice in event["choices"]:
            for field, values in (choice["logprobs"] or {}).items():
                if values is not None:
                    streamed[choice["index"]].setdefault(field, []).extend(values)
    for choice, told in zip(whole["choices"], streamed, strict=True):
        assert {**choice["logprobs"], **told} == choice["logprobs"]
        assert {"refusal": None, **told}.keys() >= choice["logprobs"].keys()


def test_of_a_text(start: Start) -> None:
    [choice] = start("bc").post(COMPLETIONS, prompt="x", logprobs=1).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["b", "c", "<|im_end|>"],
        "token_logprobs": [-0.1, -2.5, -0.1],
        "top_logprobs": [{"b": -0.1}, {"b": -0.1, "c": -2.5}, {"<|im_end|>": -0.1}],
        "text_offset": [0, 1, 2],
    }
    [choice] = start("bc").post(COMPLETIONS, prompt="x", logprobs=0, max_tokens=1).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["b"]
    assert choice["logprobs"]["top_logprobs"] == [{"b": -0.1}]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["éa<|im_end|>", [195, 169, 97, 258]])
def test_of_an_echoed_prompt(start: Start, prompt: Any, max_tokens: int) -> None:
    server = start("b")
    answer = server.post(COMPLETIONS, prompt=prompt, logprobs=1, echo=True, max_tokens=max_tokens).json()
    [choice] = answer["choices"]
    assert choice["text"] == "éa<|im_end|>" + "b" * max_tokens
    assert choice["finish_reason"] == "length"
    told = choice["logprobs"]
    assert told["tokens"] == ["\ufffd", "\ufffd", "a", "<|im_end|>", "b"][: 4 + max_tokens]
    assert told["token_logprobs"] == [None, -2.5, -2.5, -0.1, -0.1][: 4 + max_tokens]
    assert told["top_logprobs"][0] is None
    assert told["text_offset"] == [0, 0, 1, 2, 12][: 4 + max_tokens]
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert server.engine.submissions[0].limit == max_tokens


def test_tokens_of_a_stop_string_are_not_told(start: Start) -> None:
    [choice] = start("abcd").post(COMPLETIONS, prompt="x", logprobs=0, stop="cd").json()["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    [choice] = start("abcd").chat(logprobs=True, stop="cd").json()["choices"]
    assert [told["token"] for told in choice["logprobs"]["content"]] == ["a", "b"]


def test_of_the_prompt(start: Start) -> None:
    server = start("b")
    [choice] = server.post(COMPLETIONS, prompt="xabc", prompt_logprobs=1).json()["choices"]
    assert choice["logprobs"] is None
    likely, other = {"logprob": -0.1, "rank": 1}, {"logprob": -2.5, "rank": 2}
    assert choice["prompt_logprobs"] == [
        None,
        {"97": {**other, "decoded_token": "a"}, "96": {**likely, "decoded_token": "`"}},
        {"98": {**likely, "decoded_token": "b"}},
        {"99": {**other, "decoded_token": "c"}, "98": {**likely, "decoded_token": "b"}},
    ]
    answer = server.chat(prompt_logprobs=0).json()
    ids = server.engine.submissions[1].prompt
    assert [list(at or {}) for at in answer["prompt_logprobs"]] == [[], *([str(token)] for token in ids[1:])]
    assert "prompt_logprobs" not in server.chat().json()


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HI})])
def test_the_shape_of_llama_server(start: Start, path: str, body: dict[str, Any]) -> None:
    told = start("b").post(path, **body, n_probs=2).json()["choices"][0]["logprobs"]
    own = {"id": 98, **entry(98, -0.1)}
    assert told["content"] == [{**own, "top_logprobs": [own, {"id": 99, **entry(99, -2.5)}]}]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"top_logprobs": 2}, "top_logprobs"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"n_probs": 21}, "n_probs"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"prompt_logprobs": "all"}, "prompt_logprobs"),
        (CHAT, {"max_tokens": 0, "echo": False}, "max_tokens"),
        (CHAT, {"n_probs": 1, "post_sampling_probs": True}, "post_sampling_probs"),
    ],
)
def test_what_is_refused(start_shared: Start, path: str, fields: dict[str, Any], param: str) -> None:
    body: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": HI}
    answer = start_shared("x").post(path, **body, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


RESPONSES = "/v1/responses"
SCORED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 2, "n": 2}),
    (COMPLETIONS, {"prompt": "x" * 300, "logprobs": 2, "echo": True, "n": 2}),
    (
        COMPLETIONS,
        {"prompt": "x" * 300, "logprobs": 2, "n": 2, "echo": True, "stream": True, "max_tokens": 1},
    ),
    (RESPONSES, {"input": "Hi", "top_logprobs": 2}),
    (RESPONSES, {"input": "Hi", "top_logprobs": 2, "stream": True}),
]


@pytest.mark.parametrize(("path", "fields"), SCORED)
def test_what_is_long_is_encoded_off_the_event_loop(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    server = start("abc" * 100)
    encoded: list[tuple[int, int]] = []

    def to_json(*args: Any, **how: Any) -> bytes:
        written: bytes = pydantic_core.to_json(*args, **how)
        encoded.append((len(written), threading.get_ident()))
        return written

    monkeypatch.setattr("qwen_serve.server.api.sse.to_json", to_json)

    def watched(write: Callable[..., bytes]) -> Callable[..., bytes]:
        def also(*args: Any, **how: Any) -> bytes:
            encoded.append((len(written := write(*args, **how)), threading.get_ident()))
            return written

        return also

    for name in ("scored", "tops"):
        monkeypatch.setattr(TokenNames, name, watched(getattr(TokenNames, name)))
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    answer = server.post(path, **{limit: 250, **fields})
    assert answer.status_code == 200
    on_the_loop = [length for length, thread in encoded if thread in server.engine.loop_threads]
    assert max(length for length, _ in encoded) > 4_000
    assert max(on_the_loop, default=0) < 2_000


def test_written_json_is_put_where_it_belongs() -> None:
    def write(found: list[str]) -> bytes:
        return f"[{','.join(found)}]".encode()

    parts = [Written(write, ['{"a":1}']), Written(write, ['"\u2028"', "2"]), "text"]
    assert encode({"x": parts, "y": Written(write, [])}) == b'{"x":[[{"a":1}],["\\u2028",2],"text"],"y":[]}'


def test_an_entry_is_made_as_it_is_written() -> None:
    """Other threads run between two entries, and only one entry exists at a time."""

    class Entry(dict[str, int]):
        pass

    made: list[weakref.ref[Entry]] = []

    def write(number: int) -> Entry:
        assert not made or made[-1]() is None
        entry = Entry(n=number)
        made.append(weakref.ref(entry))
        return entry

    several = Lazily(write, [1, 2, 3])
    assert encode({"all": several, "again": [several]}) == (
        b'{"all":[{"n":1},{"n":2},{"n":3}],"again":[[{"n":1},{"n":2},{"n":3}]]}'
    )
    assert encode(Lazily(write, [])) == b"[]"
