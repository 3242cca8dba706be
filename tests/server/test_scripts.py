"""start_server.sh and stop_server.sh: the server answers, or the script gives the reason."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from qwen_serve.bench.servers.launch import free_port
from tests.processes import run

ROOT = Path(__file__).parents[2]


def script(name: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("QWEN_")}
    inherited |= {"PYTHON": sys.executable, "RUN_DIR": str(folder), "HOST": "127.0.0.1", **environment}
    command = [str(ROOT / name), *arguments]
    return run(command, env=inherited)


SMALL = ("--threads", "1", "--ctx-size", "4096", "--prefix-checkpoints", "2", "--speculation", "off")


def test_it_answers_greedily_when_the_script_returns_and_finishes_what_runs(
    nano_f16: Path, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    started = script("start_server.sh", tmp_path, str(port), *SMALL, MODEL=str(nano_f16))
    assert started.returncode == 0, started.stderr
    try:
        assert httpx.get(f"{url}/health").status_code == 200
        again = script("start_server.sh", tmp_path, str(port), *SMALL, MODEL=str(nano_f16))
        assert again.returncode == 1
        assert f"still runs on port {port}" in again.stderr

        body = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 32}
        answers = [httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json() for _ in range(2)]
        messages = [answer["choices"][0]["message"] for answer in answers]
        assert messages[0] == messages[1]
        assert not messages[0].get("reasoning_content")

        long = {"prompt": "One, two, three", "max_tokens": 2000, "ignore_eos": True}
        last: list[httpx.Response] = []
        client = threading.Thread(
            target=lambda: last.append(httpx.post(f"{url}/v1/completions", json=long, timeout=120))
        )
        with httpx.Client(timeout=60) as probe:
            client.start()
            while "\nqwen_running_sequences 1.0" not in probe.get(f"{url}/metrics").text:
                assert client.is_alive(), "it was answered before the server was stopped"
    finally:
        stopped = script("stop_server.sh", tmp_path, str(port))
    client.join()
    assert stopped.returncode == 0, stopped.stderr
    assert last[0].status_code == 200
    assert last[0].json()["usage"]["completion_tokens"] == 2000
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert script("stop_server.sh", tmp_path, str(port)).returncode == 0


def test_what_keeps_it_from_starting_is_told(tmp_path: Path) -> None:
    port = free_port()
    failed = script("start_server.sh", tmp_path, str(port), MODEL=str(tmp_path / "none.gguf"))
    assert failed.returncode == 1
    assert "none.gguf" in failed.stderr
    assert not (tmp_path / f"server-{port}.pid").exists()


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        failed = script("start_server.sh", tmp_path, str(port), MODEL="any.gguf")
    assert failed.returncode == 1
    assert f"port {port} is taken by another program" in failed.stderr
