"""A failure affects only its request, and disconnecting frees the engine."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from qwen_serve.server.engine import EngineDead, GenerationError, QueueFull
from tests.messages import user
from tests.server.api.conftest import Start
from tests.server.api.formats.test_completions import events
from tests.server.api.test_bad_input import error_of
from tests.waiting import wait_until

LONG = "word " * 400


def crashing(text: str) -> Any:
    """A script that fails after two tokens for certain prompts."""
    return [104, 105, GenerationError("no memory slot")] if "crash" in text else "fine"


@pytest.mark.parametrize("n", [1, 3])
def test_a_crash_takes_one_request_with_it(start: Start, n: int) -> None:
    server = start(crashing, delay=0.005)
    with ThreadPoolExecutor(8) as pool:
        prompts = ["crash" if number % 4 == 0 else "ok" for number in range(8)]
        answers = list(pool.map(lambda prompt: server.post("/v1/completions", prompt=prompt, n=n), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        if prompt == "ok":
            assert answer.status_code == 200
        else:
            assert error_of(answer, 500)["type"] == "server_error"
    assert server.http.get("/ping").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_crash_in_a_stream_is_an_event(start: Start, path: str) -> None:
    server = start(crashing)
    body: Any = {"messages": [user("crash")]}
    if path == "/v1/completions":
        body = {"prompt": "crash"}
    *_, last = events(server, path, **body)
    assert last["error"]["type"] == "server_error", "an error is the last event, not [DONE]"


def test_an_error_nobody_foresaw(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(lambda _: ZeroDivisionError("secret detail"))
    answer = server.post("/v1/completions", prompt="x")
    assert "secret" not in error_of(answer, 500)["message"]
    assert f"request {answer.headers['x-request-id']} failed" in caplog.text
    assert "ZeroDivisionError: secret detail" in caplog.text
    # on the same connection, which stays open
    wait_until(lambda: 'status="500"' in server.http.get("/metrics").text)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [(QueueFull("8 run and 256 wait", 7), 429, "queue_full"), (EngineDead("it died"), 503, "engine_dead")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_come_with_their_status(
    start: Start, failure: Exception, status: int, code: str, stream: bool
) -> None:
    server = start(lambda _: failure)
    answer = server.post("/v1/completions", prompt="x", stream=stream)
    assert error_of(answer, status)["code"] == code
    assert answer.headers.get("retry-after") == ("7" if status == 429 else None)


def test_a_full_queue_gives_up_the_whole_request(start: Start) -> None:
    server = start(LONG, delay=0.01, capacity=2)
    assert error_of(server.post("/v1/completions", prompt="x", n=3), 429)
    wait_until(lambda: not server.engine.running)
    assert all(entry.cancelled for entry in server.engine.submissions)


def leave(url: str, body: str, path: str, *, after: int, once: Callable[[], object]) -> None:
    """Send a request and disconnect after `after` bytes of the response, `once` that holds."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        received = 0
        while received < after:
            received += len(connection.recv(4096))
        wait_until(once)


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
@pytest.mark.parametrize(
    ("options", "after"), [('"stream": true', 600), ('"stream": true', 0), ('"n": 2', 0)]
)
def test_a_client_that_leaves_frees_its_sequences(start: Start, path: str, options: str, after: int) -> None:
    server = start(LONG, delay=0.005)
    body = f'{{"prompt": "x", "max_tokens": {len(LONG)}, {options}}}'
    leave(server.url, body, path, after=after, once=lambda: server.engine.submissions)
    wait_until(lambda: not server.engine.running)
    assert all(entry.cancelled and entry.sent < len(LONG) for entry in server.engine.submissions)
    wait_until(lambda: server.service.in_flight == 0)
    assert f'qwen_requests_total{{endpoint="{path}",status="499"}} 1.0' in server.http.get("/metrics").text
    assert server.post(path, prompt="x", max_tokens=1).status_code == 200


def test_a_client_that_leaves_during_its_upload(start: Start) -> None:
    server = start("x")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        wait_until(lambda: server.service.in_flight == 1)
    wait_until(lambda: server.service.in_flight == 0)
    assert server.post("/invocations", prompt="x").status_code == 200


def test_many_at_once(start: Start) -> None:
    server = start(lambda text: text[::-1], delay=0.001)
    with ThreadPoolExecutor(16) as pool:
        prompts = [f"prompt {number}" for number in range(48)]
        answers = pool.map(lambda prompt: server.post("/invocations", prompt=prompt).json(), prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer["choices"][0]["text"] == prompt[::-1]


def test_the_loop_stays_free_while_a_large_prompt_is_tokenised(start: Start) -> None:
    server = start("x", context_size=10**9)
    tokenize = server.engine.vocab.tokenize
    entered, release = threading.Event(), threading.Event()

    def slow(text: str, *, special: bool, check: object = None) -> list[int]:
        entered.set()
        assert release.wait(20)
        return tokenize(text[:10], special=special)

    server.engine.vocab.tokenize = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", prompt="x" * 100_000)
        assert entered.wait(20)
        with httpx.Client(timeout=20) as other:
            assert other.get(f"{server.url}/ping").status_code == 200
        release.set()
        assert answer.result().status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG * 3}),
        ("/v1/completions", {"prompt": [120] * 6000, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG * 3}]}),
    ],
)
def test_a_long_prompt_is_checked_once_and_not_on_the_loop(
    start: Start, path: str, body: dict[str, Any]
) -> None:
    server = start("x", context_size=10**5, capacity=128)
    assert server.post(path, **body, n=128).status_code == 200
    engine = server.engine
    [checked] = engine.checks
    assert checked.thread not in engine.loop_threads
    assert len(engine.submissions) == 128
    assert all(entry.checked is checked for entry in engine.submissions), "the choices share the prompt"
