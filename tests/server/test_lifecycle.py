"""Start and end of the server process."""

import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from qwen_serve.server.__main__ import CANNOT_LISTEN, CUT_SHORT
from tests.server.serving import ServerProcess

ENDLESS = {"prompt": "a b c", "max_tokens": 100_000, "ignore_eos": True}


def test_sigterm_finishes_what_runs_and_nothing_else_and_settings_and_memory_are_told(nano_f16: Path) -> None:
    # without drafts and long, so that the answer outlasts what is asked meanwhile
    with ServerProcess("--model", nano_f16, "--ctx-size", "4096", "--speculation", "off") as server:
        with server.client() as http:
            body = {**ENDLESS, "max_tokens": 2500, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                server.wait_for(lambda: http.get("/ping").status_code == 503)
                assert http.get("/ping").json() == {"status": "draining"}
                refused = http.post("/v1/completions", json={"prompt": "x"})
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "draining"
                rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.wait() == 0
        for told in ("ctx_size = 4096", "KV cache", "MiB"):
            assert told in server.log


def test_what_outlasts_the_drain_timeout_is_told(nano_f16: Path) -> None:
    with ServerProcess("--model", nano_f16, "--drain-timeout", "0.5") as server:
        with (
            server.client() as http,
            http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            answers: list[httpx.Response] = []
            whole = threading.Thread(
                target=lambda: answers.append(http.post("/v1/completions", json=ENDLESS))
            )
            whole.start()
            server.wait_for(lambda: "qwen_running_sequences 2.0" in http.get("/metrics").text)
            server.process.send_signal(signal.SIGTERM)
            data = [line for line in lines if line.startswith("data: ")]
            whole.join()
        assert '"code":"draining"' in data[-1]
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "draining"
        assert server.wait() == CUT_SHORT
        assert "cut short: 2 requests" in server.log
        assert "Traceback" not in server.log


def test_a_body_that_is_still_sent_is_not_waited_for(nano_f16: Path) -> None:
    with ServerProcess("--model", nano_f16, "--drain-timeout", "600") as server:
        url = httpx.URL(server.wait_ready())
        with socket.create_connection((url.host, url.port or 80), timeout=20) as client:
            before = "GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"  # its answer tells that all was read
            head = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 100"
            begun = f'{before}POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{{"prompt"'
            client.sendall(begun.encode())
            answer = b""
            while b'"ok"}' not in answer:
                answer += client.recv(65536)
            server.process.send_signal(signal.SIGTERM)
            assert client.recv(65536).startswith(b"HTTP/1.1 503 ")
        assert server.wait() == 0
        assert "Traceback" not in server.log


def test_sighup_drains_too(nano_f16: Path) -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("these tests run under nohup, which a server respects")
    with ServerProcess("--model", nano_f16, "--speculation", "off") as server:
        with server.client() as http:
            body = {**ENDLESS, "max_tokens": 500, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGHUP)
                assert list(lines)[-2] == "data: [DONE]"
        assert server.wait() == 0


def test_the_second_signal_ends_it_at_once(nano_f16: Path) -> None:
    with ServerProcess("--model", nano_f16, "--drain-timeout", "600") as server, server.client() as http:

        def endless() -> None:
            with pytest.raises(httpx.HTTPError):
                http.post("/v1/completions", json=ENDLESS)

        thread = threading.Thread(target=endless)
        thread.start()
        server.wait_for(lambda: "qwen_running_sequences 1.0" in http.get("/metrics").text)
        server.process.send_signal(signal.SIGINT)
        server.wait_for(lambda: "draining" in server.log)
        time.sleep(0.2)  # a second signal, rather than one with the first
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT
        thread.join()


def test_sigterm_while_the_model_loads(nano_f16: Path) -> None:
    with ServerProcess("--model", nano_f16) as server:
        assert server.url
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF\3\0\0\0 but not really")
    with ServerProcess("--model", model) as server:
        assert server.wait() == 1
        assert "broken.gguf is not a whole GGUF file" in server.log
        assert "Traceback" not in server.log


def test_a_port_that_is_taken(nano_f16: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with ServerProcess("--model", nano_f16, "--port", str(taken.getsockname()[1])) as server:
            assert server.wait() == CANNOT_LISTEN
            assert f"--port {taken.getsockname()[1]}: Address already in use" in server.log
            assert "KV cache" not in server.log, "the model is not loaded first"
            assert "Traceback" not in server.log


class Stuck(ServerProcess):
    module = "tests.server.stuck"


def test_an_event_loop_that_stands_still_ends_the_process(nano_f16: Path) -> None:
    with Stuck("--model", nano_f16, "--ctx-size", "512", "--watchdog", "3") as server:
        url = server.wait_ready()
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/stuck", timeout=60)
        assert server.wait() == 1
        assert "in stick" in server.log, "where it stood"


@pytest.mark.slow
def test_a_watchdog_needs_no_thread(nano_f16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment without memory for one ends nothing, and the watchdog still watches."""
    monkeypatch.setenv("NO_THREAD", "1")
    with Stuck("--model", nano_f16, "--ctx-size", "512", "--watchdog", "3") as server:
        url = server.wait_ready()
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/stuck", timeout=60)
        assert server.wait() == -signal.SIGALRM
        assert "in stick" in server.log, "where it stood"


@pytest.mark.slow
def test_a_watchdog_can_be_off(nano_f16: Path) -> None:
    with Stuck("--model", nano_f16, "--ctx-size", "512", "--watchdog", "0") as server:
        url = server.wait_ready()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/stuck", timeout=2)
        assert server.process.poll() is None
