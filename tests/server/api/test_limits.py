"""Requests that are refused for their size, and costs that grow no faster than the size."""

import json
import threading
import time
from typing import Any

import httpx
import pytest

from qwen_serve.server.api.errors import ApiError
from qwen_serve.server.api.fields.generation import LONGEST_NAME, MAX_STOP_CHARACTERS, MAX_STOPS
from qwen_serve.server.api.limits import LARGE, Bodies
from qwen_serve.server.api.request import MAX_VALUES
from qwen_serve.server.chat.tool_schemas import ToolSchemas
from tests.server.api.conftest import Server, Start
from tests.server.api.test_bad_input import error_of
from tests.server.api.test_connection import connected, post
from tests.waiting import wait_until

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(start_shared: Start) -> Server:
    return start_shared("x")


@pytest.mark.parametrize(
    ("stop", "accepted"),
    [
        (["ab" * 2**19], False),
        (["x"] * (MAX_STOPS + 1), False),
        (["x" * MAX_STOP_CHARACTERS, "y"], False),
        ([chr(64 + i) * (MAX_STOP_CHARACTERS // MAX_STOPS) for i in range(MAX_STOPS)], True),
    ],
    ids=["long", "many", "together", "most"],
)
def test_stop_strings_have_limits(server: Server, stop: list[str], accepted: bool) -> None:
    response = server.post(COMPLETIONS, prompt="x", stop=stop, n=8)
    if accepted:
        assert response.status_code == 200
    else:
        error = error_of(response, 400)
        assert error["param"] == "stop"
        assert "64 strings of 4,096 characters" in error["message"]


def test_a_models_name_has_a_limit(server: Server) -> None:
    assert error_of(server.post(COMPLETIONS, prompt="x", model="m" * 10**6, n=32), 400)["param"] == "model"
    assert server.post(COMPLETIONS, prompt="x", model="m" * LONGEST_NAME).status_code == 200


@pytest.mark.parametrize("field", ["repetition_penalty", "repeat_penalty"])
def test_a_penalty_that_takes_logits_to_infinity(server: Server, field: str) -> None:
    assert error_of(server.post(COMPLETIONS, prompt="x", **{field: 1e-38}), 400)["param"] == field
    assert server.post(COMPLETIONS, prompt="x", **{field: 0.01}).status_code == 200


def test_more_answers_than_could_ever_wait(server: Server) -> None:
    error = error_of(server.post(COMPLETIONS, prompt=["x"] * 3, n=128), 400)
    assert "384 answers" in error["message"]
    assert "at most 264" in error["message"]
    assert error_of(server.post(COMPLETIONS, prompt=["x"], n=128), 429)["code"] == "queue_full"


def test_an_echo_that_multiplies(start: Start) -> None:
    server = start("x", max_body_mib=1)
    body = {"prompt": [[120] * 4000] * 3, "echo": True, "max_tokens": 1}
    assert error_of(server.post(COMPLETIONS, **body, n=88), 400)["param"] == "echo"
    assert server.post(COMPLETIONS, **body, n=2).status_code == 200


@pytest.mark.parametrize("inner", ["[],", "0,", "{},", '{"a":0},'])
def test_a_body_of_too_many_values(server: Server, inner: str) -> None:
    body = '{"prompt": "x", "y": [' + inner * (MAX_VALUES + 1) + "0]}"
    response = server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert "524,288" in error_of(response, 400)["message"]


def test_a_recursive_schema_takes_linear_time() -> None:
    recursive = {"anyOf": [{"$ref": "#/properties/a"}] * 7}
    pair = {"anyOf": [{"$ref": "#/properties/b"}] * 50}
    parameters = {
        "properties": {"a": recursive, "b": {"anyOf": [{"$ref": "#/properties/c"}] * 50}, "c": pair}
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    began = time.process_time()
    schemas = ToolSchemas([tool])
    assert [schemas.types("f", name) for name in "abc"] == [set()] * 3
    assert time.process_time() - began < 5  # 45 s and more


def test_types_are_found_behind_references() -> None:
    parameters = {
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]}},
        "$defs": {
            "loop": {"oneOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/number"}]},
            "number": {"type": "integer"},
        },
    }
    schemas = ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert schemas.types("f", "a") == {"integer", "null"}


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_in_an_argument(start: Start, stream: bool) -> None:
    call = '<tool_call>\n<function=f>\n<parameter=a>\n["\\ud800é"]\n</parameter>\n</function>\n</tool_call>'
    parameters = {"properties": {"a": {"type": "array"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    response = start(call).chat(tools=[tool], stream=stream)
    assert response.status_code == 200
    assert "\\\\ud800é" in response.text
    if not stream:
        [made] = response.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"a": ["\ud800é"]}


def test_bodies_share_a_bound() -> None:
    bodies = Bodies(10)
    one, other = bodies.begin(), bodies.begin()
    one.grow(6)
    with pytest.raises(ApiError) as caught:
        other.grow(5)
    assert caught.value.status == 429
    other.grow(4)
    one.release()
    one.release()
    assert bodies.held == 4
    other.release()
    assert bodies.held == 0


def test_bodies_that_are_received_are_counted(start: Start) -> None:
    server = start("x", max_body_mib=1, max_bodies_mib=1)

    def body() -> Any:
        yield b" " * 800_000
        assert release.wait(20)
        yield b'{"prompt": "x"}'

    release = threading.Event()
    headers = {"content-type": "application/json"}
    answers: list[httpx.Response] = []
    slow = threading.Thread(
        target=lambda: answers.append(server.http.post(COMPLETIONS, content=body(), headers=headers))
    )
    slow.start()
    wait_until(lambda: server.service.bodies.held >= 800_000)
    refused = server.http.post(COMPLETIONS, content=b" " * 300_000, headers=headers)
    assert error_of(refused, 429)["code"] == "bodies_full"
    assert refused.headers["retry-after"] == "1"
    assert server.post(COMPLETIONS, prompt="x").status_code == 200
    release.set()
    slow.join()
    assert answers[0].status_code == 200
    wait_until(lambda: server.service.bodies.held == 0)


def test_small_requests_never_wait_for_large_ones(start: Start) -> None:
    server = start("x", context_size=10**9)
    tokenize = server.engine.vocab.tokenize
    entered, release = threading.Semaphore(0), threading.Event()

    def slow(text: str, *, special: bool, check: object = None) -> list[int]:
        if len(text) >= LARGE:
            entered.release()
            assert release.wait(20)
        return tokenize(text[:10], special=special)

    server.engine.vocab.tokenize = slow  # type: ignore[method-assign]
    large = [
        threading.Thread(target=server.post, args=(COMPLETIONS,), kwargs={"prompt": "x" * LARGE})
        for _ in range(5)
    ]
    for thread in large:
        thread.start()
    assert entered.acquire(timeout=20)
    assert server.post(COMPLETIONS, prompt="y" * 6000).status_code == 200
    assert not entered.acquire(blocking=False)  # one large body is worked on at a time
    release.set()
    for thread in large:
        thread.join()
    wait_until(lambda: server.service.bodies.held == 0)


def test_work_ends_with_its_client(start: Start) -> None:
    server = start("x", context_size=10**9)
    entered, ended = threading.Event(), threading.Event()

    def endless(text: str, *, special: bool, check: Any) -> list[int]:
        entered.set()
        try:
            while True:
                check(1)
        finally:
            ended.set()

    server.engine.vocab.tokenize = endless  # type: ignore[method-assign, assignment]
    with connected(server) as client:
        client.sendall(post(json.dumps({"prompt": "x" * 10_000})))
        assert entered.wait(60)
        assert not ended.is_set()
    assert ended.wait(60)
    wait_until(lambda: server.service.in_flight == 0)
    assert server.service.bodies.held == 0


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_no_more_tokens_than_a_context_at_once(
    server: Server, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenize(text: str, *, special: bool, check: Any) -> list[int]:
        check(2**18 + 1)
        return []

    monkeypatch.setattr(server.engine.vocab, "tokenize", tokenize)
    response = server.post(path, content="x" * 5000, tokens=[1] * (2**18 + 1))
    assert "262,144" in error_of(response, 400)["message"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_scheme_has_no_case(start_shared: Start, scheme: str) -> None:
    server = start_shared("x", api_key="secret")

    def ask(header: str) -> int:
        return server.http.get("/v1/models", headers={"authorization": header}).status_code

    assert ask(f"{scheme} secret") == 200
    assert ask(f"{scheme} Secret") == 401
    assert ask("Basic secret") == 401
    assert ask("secret") == 401


def test_a_path_is_one_line_of_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "qwen_serve.server"):
        server.http.get("/%0aFAKE%1b[31m%e2%80%a8x")
    wait_until(lambda: "FAKE" in caplog.text)
    [line] = [record.getMessage() for record in caplog.records if "FAKE" in record.getMessage()]
    assert line.startswith("GET /%0AFAKE%1B")
    assert line.isprintable()
    assert line.isascii()


@pytest.mark.parametrize(
    "headers",
    [
        {"content-encoding": "IDENTITY", "content-type": "application/json"},
        {"content-type": "application/json; charset=utf-8; x=y"},
        {"content-type": 'application/json; x="charset=latin-1"; charset="UTF-8"'},
    ],
)
def test_headers_that_are_right(server: Server, headers: dict[str, str]) -> None:
    assert server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_a_grammar_ends_with_its_client(start: Start, path: str) -> None:
    """Neither the drain nor later grammars wait for it."""
    server = start("x")
    patterns: dict[str, Any] = {f"^{path[-4:]}{i}b.*$": {} for i in range(500)}
    body = {"guided_json": {"type": "object", "patternProperties": patterns}}
    ask = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    for _ in range(2):  # it was not compiled to the end, and so not refused the second time
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(path, json={**ask, **body}, timeout=0.3)
        wait_until(lambda: server.service.in_flight == 0)
    assert server.http.post(path, json={**ask, "guided_json": {"type": "null"}}).status_code == 400
