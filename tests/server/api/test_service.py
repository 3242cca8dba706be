"""Loading, ready, draining, failed; models, metrics, the API key."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from qwen_serve.server.api import Backend, Service
from qwen_serve.server.api.fields.sampling import sampling_defaults
from qwen_serve.server.api.observe.metrics import Metrics
from qwen_serve.server.chat import Prompter
from qwen_serve.server.engine import Engine
from qwen_serve.server.engine.sampling.grammar import Grammar, GrammarCompiler
from qwen_serve.server.settings import Settings
from tests.server.api.conftest import Start, starter
from tests.server.api.fakes import FakeVocab
from tests.server.api.test_bad_input import error_of
from tests.waiting import wait_until


@pytest.mark.parametrize("path", ["/ping", "/health"])
def test_503_until_loaded(start: Start, path: str) -> None:
    go = threading.Event()

    def load(backend: Backend) -> Backend:
        assert go.wait(20)
        return backend

    server = start("x", load=load)
    try:
        answer = server.http.get(path)
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        refused = server.post("/v1/completions", prompt="x")
        assert error_of(refused, 503)["code"] == "loading"
        assert refused.headers["retry-after"]
        assert server.http.get("/metrics").status_code == 200
        assert error_of(server.http.get("/v1/models"), 503)
    finally:
        go.set()
    wait_until(lambda: server.http.get(path).status_code == 200)
    assert server.http.get(path).json() == {"status": "ok"}, "what llama-server's clients look for"
    assert server.http.head(path).status_code == 200
    assert server.post("/v1/completions", prompt="x").status_code == 200


def test_a_model_that_does_not_load(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    def load(_: Backend) -> Backend:
        raise RuntimeError("short by 3 GiB")

    server = start("x", load=load)
    wait_until(lambda: server.service.failure is not None)
    assert server.http.get("/ping").json() == {"status": "failed"}
    assert error_of(server.post("/invocations", prompt="x"), 503)["code"] == "failed"
    assert "short by 3 GiB" in caplog.text


def test_an_engine_that_dies(start: Start) -> None:
    server = start("x")
    server.engine.ready = False
    assert server.http.get("/ping").status_code == 503
    assert error_of(server.post("/invocations", prompt="x"), 503)["code"] == "failed"


def test_draining_lets_running_requests_finish(start: Start) -> None:
    server = start("x" * 150, held=True)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/invocations", prompt="x")
        wait_until(lambda: bool(server.engine.running))
        server.service.drain()
        assert not server.service.drained
        assert not server.service.overdue
        assert server.http.get("/ping").json() == {"status": "draining"}
        assert error_of(server.post("/v1/completions", prompt="x"), 503)["code"] == "draining"
        server.engine.held = False
        assert running.result().json()["choices"][0]["text"] == "x" * 150
    wait_until(lambda: server.service.drained)


def test_draining_has_an_end(start: Start) -> None:
    server = start("x", held=True, drain_timeout=0.2)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/invocations", prompt="x")
        wait_until(lambda: bool(server.engine.running))
        server.service.drain()
        wait_until(lambda: server.service.overdue > 0)
        assert not server.service.drained
        assert server.service.cut_short()
        assert error_of(running.result(), 503)["code"] == "draining"
        wait_until(lambda: server.service.drained)
        assert not server.service.cut_short()


def test_a_stream_that_is_cut_short_says_so(start: Start) -> None:
    server = start("x" * 4000, delay=0.01)
    body = {"prompt": "x", "stream": True, "max_tokens": 4000}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.service.drain()
        server.service.cut_short()
        data = [line for line in lines if line.startswith("data: ")]
    assert '"code":"draining"' in data[-1]
    assert "[DONE]" not in data[-1]


def test_work_on_a_prompt_is_cut_short_too(start: Start) -> None:
    server = start("x", context_size=10**9)
    entered = threading.Event()

    def endless(text: str, *, special: bool, check: Any) -> list[int]:
        entered.set()
        while True:
            check(1)

    server.engine.vocab.tokenize = endless  # type: ignore[method-assign, assignment]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", prompt="x" * 10_000)
        assert entered.wait(20)
        server.service.drain()
        server.service.cut_short()
        assert error_of(running.result(), 503)["code"] == "draining"


def test_a_grammar_that_is_waited_for_is_cut_short_too(start: Start) -> None:
    server = start("x")
    entered, asked, release = (threading.Event() for _ in range(3))

    def never() -> None:
        entered.set()
        release.wait(60)

    class Compiler(GrammarCompiler):
        def compile(self, text: str) -> Future[Grammar]:
            compiled = super().compile(text)
            asked.set()
            return compiled

    compiler = Compiler(never, FakeVocab.eos_id)
    server.engine.grammars = compiler  # type: ignore[assignment]
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.post, "/v1/completions", prompt="x", guided_json={})
            assert entered.wait(20) and asked.wait(20)
            server.service.drain()
            server.service.cut_short()
            assert error_of(running.result(), 503)["code"] == "draining"
    finally:
        release.set()
        compiler.close()


def test_the_engine_is_closed_at_the_end(tmp_path: Path) -> None:
    with starter(tmp_path) as start:
        server = start("x")
        assert not server.engine.closed
    assert server.engine.closed


class ClosesOnLoad(Service):
    """An engine that another thread closes at the moment when loading ends."""

    closer: threading.Thread

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_backend" and value is not None:
            self.closer = threading.Thread(target=self.close)
            self.closer.start()
            self.closer.join(0.2)  # as far as it gets while this thread is here


class CountingEngine:
    """An engine that closes slowly, and counts the threads that close it at the same time."""

    def __init__(self) -> None:
        self.calls = self.inside = self.most_inside = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self.calls += 1
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        time.sleep(0.5)  # long enough for another to come, if any does
        with self._lock:
            self.inside -= 1


def test_a_model_is_freed_by_one_thread_when_told_to_stop_as_loading_ends(tmp_path: Path) -> None:
    engine = CountingEngine()
    model = tmp_path / "fake.gguf"
    model.touch()
    backend = Backend(cast(Engine, engine), cast(Prompter, None), sampling_defaults({}, greedy=True))
    service = ClosesOnLoad(Settings(model=model), Metrics(), lambda: backend)
    service.start()
    wait_until(lambda: hasattr(service, "closer"))
    wait_until(lambda: engine.calls > 0)
    service.closer.join()
    wait_until(lambda: engine.inside == 0)
    assert (engine.calls, engine.most_inside) == (1, 1)


def test_a_model_that_loads_after_the_end_is_freed_at_once(tmp_path: Path) -> None:
    engine = CountingEngine()
    model = tmp_path / "fake.gguf"
    model.touch()
    backend = Backend(cast(Engine, engine), cast(Prompter, None), sampling_defaults({}, greedy=True))
    go = threading.Event()

    def load() -> Backend:
        assert go.wait(20)
        return backend

    service = Service(Settings(model=model), Metrics(), load)
    service.start()
    service.close()
    assert engine.calls == 0
    go.set()
    wait_until(lambda: engine.calls == 1 and engine.inside == 0)
    service.close()
    assert engine.calls == 1, "it is freed already"
    assert service.loaded is None


def test_models(start: Start) -> None:
    server = start("x", alias="Qwen/Qwen3.5-4B")
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert card["id"] == "Qwen/Qwen3.5-4B"
    assert card["object"] == "model"
    assert card["max_model_len"] == 4096
    assert card["meta"]["name"] == "Fake"
    assert card["meta"]["n_params"] == 7
    assert card["meta"]["n_vocab"] == server.engine.vocab.size
    assert card["meta"]["n_ctx_train"] == 262144
    assert server.http.get("/v1/models/Qwen/Qwen3.5-4B").json() == card


def test_metrics(start: Start) -> None:
    server = start("abcd")
    server.post("/v1/completions", prompt="xyz")
    server.post("/v1/completions", prompt="xyz", stream=True)
    server.post("/v1/completions", prompt=5)
    server.http.get("/no/such/path")
    text = server.http.get("/metrics").text
    for line in [
        'qwen_requests_total{endpoint="/v1/completions",status="200"} 2.0',
        'qwen_requests_total{endpoint="/v1/completions",status="400"} 1.0',
        'qwen_requests_total{endpoint="other",status="404"} 1.0',
        "qwen_prompt_tokens_total 6.0",
        "qwen_completion_tokens_total 8.0",
        'qwen_generations_total{reason="stop"} 2.0',
        'qwen_time_to_first_token_seconds_count{service_tier="default"} 2.0',
        "qwen_time_per_output_token_seconds_count 2.0",
        "qwen_running_sequences 0.0",
        "qwen_kv_cells_used 3.0",
    ]:
        assert line in text


def test_the_api_key(start: Start) -> None:
    server = start("x", api_key="sesamé")
    wrong: list[Any] = [{}, {"authorization": "Bearer wrong"}, {"authorization": "sesamé".encode()}]
    for headers in wrong:
        answer = server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert error_of(answer, 401)["type"] == "authentication_error"
    good: Any = {"authorization": "Bearer sesamé".encode()}
    assert server.http.post("/v1/completions", json={"prompt": "x"}, headers=good).status_code == 200
    assert error_of(server.http.get("/v1/models"), 401)
    assert server.http.get("/ping").status_code == 200
    assert server.http.get("/metrics").status_code == 200
