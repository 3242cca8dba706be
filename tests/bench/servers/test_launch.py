"""Servers are started, awaited, and always stopped together with their children."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from qwen_serve.bench.servers import launch
from qwen_serve.bench.servers.launch import ServerProcess, StartError, free_port
from tests.processes import ends, is_running, run
from tests.waiting import until

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER


def process(
    tmp_path: Path, code: str = SERVER, *, ready: str = "/ready", timeout: float = 60.0
) -> ServerProcess:
    port = free_port()
    command = [sys.executable, "-c", code, str(port)]
    url = f"http://127.0.0.1:{port}"
    return ServerProcess(
        "fake", command, url, ready_path=ready, log=tmp_path / f"{port}.log", timeout=timeout
    )


def child_of(server: ServerProcess) -> int:
    return int(server.tail().split("child ")[1].split()[0])


async def test_start_and_stop(tmp_path: Path) -> None:
    async with process(tmp_path) as server:
        assert server.running
        assert server.start_seconds > 0
        child = child_of(server)
        assert is_running(child)
    assert not server.running
    assert ends(child), "children go too"
    await server.stop()  # a second time is nothing


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from qwen_serve.bench.servers import launch
from qwen_serve.bench.servers.launch import ServerProcess, free_port

async def main():
    port = free_port()
    command = [sys.executable, "-c", sys.argv[2], str(port)]
    url, log = f"http://127.0.0.1:{port}", Path(sys.argv[1])
    async with ServerProcess("fake", command, url, ready_path="/ready", log=log) as server:
        print(server._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells a child of its parent's death")
def test_a_killed_parent_takes_the_server_along(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "log"), SERVER.replace("600", "0")]
    done = run(command)
    assert done.returncode == -signal.SIGKILL
    assert ends(int(done.stdout))


async def test_waiting_for_a_server_that_should_run_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PATIENCE_SECONDS", 0.0)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StartError, match=r"not ready within 0\.5 s"):
        await ServerProcess("vllm", [], url, ready_path="/v1/models", timeout=0.5).start()
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith(f"waiting for vllm up to 0.5 s: cannot connect to {url}")


async def test_what_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    server = process(tmp_path, STUBBORN)
    await server.start()
    child = child_of(server)
    await server.stop(patience=0.2)
    assert ends(child)


async def test_a_program_that_ends(tmp_path: Path) -> None:
    code = "print('loading'); print('no such model'); raise SystemExit(3)"
    with pytest.raises(StartError, match=r"ended with status 3; its log ends:\n +loading\n +no such model"):
        await process(tmp_path, code).start()


async def test_a_program_that_is_never_ready(tmp_path: Path) -> None:
    async with process(tmp_path) as answers:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        server = ServerProcess(
            "fake", command, answers.url, ready_path="/never", log=tmp_path / "log", timeout=1
        )
        with pytest.raises(StartError, match=r"not ready within 1 s: /never answers 404; its log"):
            await server.start()
        assert not server.running


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    server = ServerProcess("x", ["/no/such"], "http://127.0.0.1:9", ready_path="/", log=tmp_path / "x.log")
    with pytest.raises(StartError, match="x: cannot run /no/such: No such file"):
        await server.start()


async def test_somebody_elses_server_is_not_stopped(tmp_path: Path) -> None:
    async with process(tmp_path) as server:
        async with ServerProcess("theirs", [], server.url, ready_path="/ready"):
            pass
        assert server.running
    gone = ServerProcess("theirs", [], server.url, ready_path="/ready", timeout=0.1)
    with pytest.raises(StartError, match=r"theirs: not ready within 0.1 s: cannot connect"):
        await gone.start()


async def test_cancelling_stops_what_is_starting(tmp_path: Path) -> None:
    server = process(tmp_path, ready="/never")
    starting = asyncio.create_task(server.start())
    await until(lambda: "child" in server.tail())
    child = child_of(server)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert ends(child)
