"""A model that is unloaded while there are no requests."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest

from qwen_serve.server.api import Backend
from qwen_serve.server.api.routes import endpoints
from qwen_serve.server.engine import ModelLoadError
from tests.server.api.conftest import Server, Start
from tests.server.api.fakes import FakeEngine
from tests.server.api.test_bad_input import error_of
from tests.waiting import wait_until

SOON_S = 0.05


class Loader:
    """Loads at once, when it is allowed to, or never."""

    def __init__(self) -> None:
        self.may, self.failure = threading.Event(), ""
        self.may.set()
        self.begun = 0

    def __call__(self, backend: Backend) -> Backend:
        self.begun += 1
        assert self.may.wait(20)
        if self.failure:
            raise ModelLoadError(self.failure)
        cast(FakeEngine, backend.engine).closed = False  # as a new one
        return backend


def asleep(server: Server) -> Server:
    """The server, after its model was unloaded."""
    wait_until(lambda: server.service.status == "sleeping" and server.engine.closed)
    return server


def test_what_tells_of_the_model_does_not_wake_it_and_what_needs_it_does(start: Start) -> None:
    loader = Loader()
    server = asleep(start("abc", load=loader, sleep_idle_seconds=SOON_S, alias="m"))
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/health").json() == server.http.get("/ping").json() == {"status": "sleeping"}
    props = server.http.get("/props").json()
    assert props["is_sleeping"] and props["default_generation_settings"]["n_ctx"] == 4096
    for path in ("/models", "/v1/models"):
        assert server.http.get(path).json()["data"][0]["max_model_len"] == 4096
    assert server.http.get("/v1/models/m").json()["id"] == "m"
    assert server.http.get("/api/tags").json()["models"][0]["name"] == "m"
    assert server.http.get("/api/ps").json() == {"models": []}
    assert "qwen_kv_cells 0.0" in server.http.get("/metrics").text
    assert server.post("/api/show", model="m").json()["model_info"]["general.parameter_count"]
    assert loader.begun == 1
    assert server.post("/v1/completions", prompt="x").json()["choices"][0]["text"] == "abc"
    for number, path in enumerate(("/slots", "/tokenizer_info"), 3):
        asleep(server)
        assert server.http.get(path).status_code == 200
        assert loader.begun == number


def test_a_wrong_request_does_not_wake_it(start: Start, tmp_path: Path) -> None:
    """Checks that need neither the vocabulary nor the template come before loading."""
    loader = Loader()
    options: dict[str, Any] = {
        "lora": f"sql={tmp_path}/sql.gguf",
        "slot_save_path": tmp_path,
        "scheduling_policy": "fcfs",
    }
    server = asleep(start("abc", load=loader, sleep_idle_seconds=SOON_S, alias="m", **options))
    users: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    wrong: list[tuple[str, dict[str, Any], int, str | None]] = [
        ("/v1/completions", {"prompt": 5}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "model": "sqll"}, 404, "model"),
        ("/v1/completions", {"prompt": "x", "lora": [{"id": 7, "scale": 1.0}]}, 400, "lora"),
        ("/v1/completions", {"prompt": "x", "priority": 3}, 400, "priority"),
        ("/completion", {"prompt": "x", "guided_json": "{"}, 400, "guided_json"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": users, "model": "sqll"}, 404, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "cat"}]}, 400, "messages[0].role"),
        ("/v1/chat/completions", {"messages": users, "tools": [{}]}, 400, "tools[0].function"),
        ("/v1/chat/completions", {"messages": users, "tool_choice": "required"}, 400, "tool_choice"),
        (
            "/v1/chat/completions",
            {"messages": users, "continue_final_message": True},
            400,
            "continue_final_message",
        ),
        ("/v1/messages", {"messages": users, "model": "sqll", "max_tokens": 5}, 404, None),
        ("/v1/messages/count_tokens", {"messages": [{"role": "cat"}], "model": "m"}, 400, None),
        ("/v1/responses", {"input": 5, "model": "m"}, 400, "input"),
        ("/api/chat", {"messages": [{"role": "cat"}], "model": "m"}, 400, None),
        ("/apply-template", {"messages": [{"role": "cat"}]}, 400, "messages[0].role"),
        ("/tokenize", {"messages": [{"role": "cat"}]}, 400, "messages[0].role"),
        ("/slots/0?action=forget", {}, 400, "action"),
        ("/slots/0?action=save", {"filename": "../x"}, 400, "filename"),
        ("/nowhere", {}, 404, None),
    ]
    for path, body, status, param in wrong:
        answer = server.post(path, **body)
        assert answer.status_code == status, (path, body, answer.text)
        if param is not None:
            assert answer.json()["error"]["param"] == param, (path, body)
    assert server.http.post("/v1/completions", content="{").status_code == 400
    assert loader.begun == 1
    assert server.service.status == "sleeping"


@pytest.mark.slow
def test_every_endpoint_that_needs_the_model_wakes_it(start: Start, tmp_path: Path) -> None:
    loader = Loader()
    server = asleep(start("abc", load=loader, sleep_idle_seconds=SOON_S, slot_save_path=tmp_path))
    users: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    chat: dict[str, Any] = {"model": "m", "messages": users, "max_tokens": 5}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/completion": {"prompt": "x"},
        "/invocations": {"prompt": "x"},
        "/v1/chat/completions": chat,
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": chat,
        "/v1/messages/count_tokens": chat,
        "/api/chat": {"model": "m", "messages": users},
        "/api/generate": {"model": "m"},
        "/tokenize": {"content": "x"},
        "/detokenize": {"tokens": [5]},
        "/apply-template": chat,
        "/v1/chat/completions/render": chat,
        "/v1/completions/render": {"prompt": "x"},
        "/v1/responses/render": {"input": "Hi"},
        "/slots/99?action=erase": {},
    }
    posted = {
        route.path for route in endpoints() if "POST" in (route.methods or ()) and route.include_in_schema
    }
    assert {path.replace("99?action=erase", "{slot}") for path in bodies} == posted - {"/api/show"}
    for number, (path, body) in enumerate(bodies.items(), 2):
        answer = server.post(path, **body)
        assert answer.status_code == (400 if "slots" in path else 200), (path, answer.text)
        assert loader.begun == number, path
        asleep(server)


def test_it_does_not_sleep_while_it_answers(start: Start) -> None:
    server = start("x" * 20, delay=SOON_S / 2, sleep_idle_seconds=SOON_S)
    answer = server.post("/v1/completions", prompt="x", max_tokens=30, stream=True)
    assert '"finish_reason":"stop"' in answer.text
    assert server.service.loads <= 2, "once at the start, and where it fell asleep before the request"
    asleep(server)


def test_ollama_is_told_when_it_will_sleep(start: Start) -> None:
    [model] = start("x", sleep_idle_seconds=3600).http.get("/api/ps").json()["models"]
    left = datetime.fromisoformat(model["expires_at"]).timestamp() - datetime.now().timestamp()
    assert 3500 < left <= 3600


def test_a_wake_that_fails_is_told_and_tried_again(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    loader = Loader()
    server = asleep(start("abc", load=loader, sleep_idle_seconds=SOON_S))
    loader.failure = "short by 3 GiB"
    error = error_of(server.post("/v1/completions", prompt="x"), 503)
    assert (error["code"], error["message"]) == (
        "loading_failed",
        "the model could not be loaded: short by 3 GiB",
    )
    assert server.http.get("/health").json() == {"status": "sleeping"}
    assert "short by 3 GiB" in caplog.text
    loader.failure = ""
    assert server.post("/v1/completions", prompt="x").status_code == 200


@pytest.mark.parametrize("drains", [False, True])
def test_all_wait_for_one_wake_unless_the_server_drains(start: Start, drains: bool) -> None:
    loader = Loader()
    server = asleep(start("abc", load=loader, sleep_idle_seconds=SOON_S))
    loader.may.clear()
    try:
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(server.post, "/v1/completions", prompt="x") for _ in range(2)]
            wait_until(lambda: loader.begun == 2 and server.service.in_flight == 2)
            if drains:
                server.service.drain()
                assert [error_of(answer.result(), 503)["code"] for answer in waiting] == ["draining"] * 2
                wait_until(lambda: server.service.drained)
            else:
                loader.may.set()
                assert [answer.result().status_code for answer in waiting] == [200, 200]
    finally:
        loader.may.set()
    assert loader.begun == 2
