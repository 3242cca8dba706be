"""The cluster: replicas of nano behind the router, killed, replaced and stopped under load."""

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen_serve.bench.servers.launch import free_port
from qwen_serve.server.cluster import Child, Cluster, main
from tests.processes import ends, is_running, run
from tests.waiting import wait_until

pytestmark = pytest.mark.alone  # loads are other ones where replicas and router wait for a core

REPLICAS = 4
START_S = 180


def free_ports(count: int) -> int:
    """The first of `count` free consecutive ports, below the system's ephemeral ones."""
    while True:
        first = random.randrange(15_000, 32_000)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@pytest.mark.parametrize("own", [None, "10.0.0.7"])
def test_a_replica_believes_no_header_about_addresses_unless_told_to(
    own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if own is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", own)
    show = "import uvicorn; print([uvicorn.Config(None).forwarded_allow_ips])"
    child = Child("worker-0", [sys.executable, "-c", show], 1, tmp_path / "log")
    child.start()
    assert child.process is not None
    assert child.process.wait() == 0
    assert child.log.read_text() == f"{[own or '']}\n"


class ClusterProcess:
    """A running cluster, whose output is read as it arrives."""

    def __init__(self, model: Path, logs: Path) -> None:
        self.port = free_ports(REPLICAS + 2)
        first = self.port + 1
        command = [sys.executable, "-m", "qwen_serve.server.cluster", "--replicas", str(REPLICAS)]
        command += ["--port", str(self.port), "--worker-port", str(first), "--logs", str(logs)]
        command += ["--model", str(model), "--threads", "1", "--ctx-size", "8192", "--parallel", "4"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QWEN_")}
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [*command, "--speculation", "off", "--prefix-checkpoints", "32"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.printed = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line

    def wait_for(self, condition: Any) -> Any:
        def met() -> Any:
            value = condition()
            assert value or self.process.poll() is None, self.printed
            return value

        return wait_until(met, START_S, lambda: self.printed)

    def workers(self) -> list[int]:
        """Process ids of the replicas, from the last printed table."""
        return [int(pid) for pid in re.findall(r"worker-\d+ +\S+ +\d+ +(\d+)", self.printed)][-REPLICAS:]

    def healthy(self) -> int:
        """Number of replicas that the router uses."""
        workers = httpx.get(f"{self.url}/workers", timeout=60).json()["workers"]
        return sum(worker["is_healthy"] for worker in workers)

    def counted(self, metric: str) -> list[float]:
        """A metric of each replica."""
        return [float(re.findall(rf"\n{metric} (\S+)", page)[0]) for page in self.metrics()]

    def metrics(self) -> list[str]:
        """Each replica's page of metrics."""
        urls = [f"http://127.0.0.1:{self.port + 1 + i}/metrics" for i in range(REPLICAS)]
        return [httpx.get(url, timeout=60).text for url in urls]

    def prompts(self) -> list[float]:
        """Number of prompt tokens that each replica received."""
        return self.counted("qwen_prompt_tokens_total")


@pytest.fixture(scope="module")
def cluster(nano_q4_k_m: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    cluster = ClusterProcess(nano_q4_k_m, tmp_path_factory.mktemp("cluster"))
    try:
        cluster.wait_for(lambda: "serving on" in cluster.printed and cluster.healthy() == REPLICAS)
        yield cluster
    finally:
        cluster.process.terminate()
        try:
            cluster.process.wait(60)
        finally:
            cluster.process.kill()


async def ask(client: httpx.AsyncClient, number: int, tokens: int = 120) -> tuple[int, str]:
    """(status, text or error); status 0: the stream broke off."""
    body = {"model": "nano", "prompt": f"Number {number} and then", "max_tokens": tokens, "ignore_eos": True}
    if number % 2:
        answer = await client.post("/v1/completions", json=body)
        text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
        return answer.status_code, text
    text, ended = "", False
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        if answer.status_code != 200:
            return answer.status_code, (await answer.aread()).decode()
        try:
            async for line in answer.aiter_lines():
                text += line
                ended |= line == "data: [DONE]"
        except httpx.RemoteProtocolError:
            pass
    return (200 if ended else 0), text


async def under_load(cluster: ClusterProcess, n: int, event: Any) -> list[tuple[int, str]]:
    """`n` requests, eight at a time; `event` happens, on a thread, once a quarter of them are under way."""
    places, started = asyncio.Semaphore(8), asyncio.Event()
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:

        async def one(number: int) -> tuple[int, str]:
            async with places:
                if number >= n // 4:
                    started.set()
                return await ask(client, number)

        tasks = [asyncio.create_task(one(number)) for number in range(n)]
        await started.wait()
        await asyncio.to_thread(event)
        return list(await asyncio.gather(*tasks))


@pytest.mark.slow
async def test_both_ways_of_asking_are_passed_on(cluster: ClusterProcess) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        body = {"messages": [{"role": "user", "content": "What is 17+25?"}], "max_tokens": 40}
        body["chat_template_kwargs"] = {"enable_thinking": True}
        message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        assert message["reasoning_content"]
        async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            streamed = "".join([line async for line in answer.aiter_lines()])
        assert "reasoning_content" in streamed
        assert "[DONE]" in streamed


@pytest.mark.slow
async def test_fields_of_our_own_pass_and_a_known_prompt_goes_where_it_is_cached(
    cluster: ClusterProcess,
) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        for subject in ("rivers", "lakes", "seas", "wells"):
            body = {"model": "nano", "thinking": True, "max_tokens": 4, "temperature": 0}
            body["messages"] = [{"role": "user", "content": f"Tell me all about {subject}. " * 40}]
            answers = [(await client.post("/v1/chat/completions", json=body)).json() for _ in range(3)]
            assert all(answer["choices"][0]["message"]["reasoning_content"] for answer in answers)
            cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
            assert min(cached[1:]) > answers[0]["usage"]["prompt_tokens"] / 2, (subject, cached)


@pytest.mark.slow
async def test_a_chat_with_pictures_goes_by_load_alone(cluster: ClusterProcess) -> None:
    """The router asks the replicas for the tokens of a text, and not of pictures; these see none."""

    def rendered() -> float:
        return sum(
            float(n) for page in cluster.metrics() for n in re.findall(r'/render",status="200"\} (\S+)', page)
        )

    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for parts, asks in ([{"type": "text", "text": "What?"}], True), ([picture], False):
        before = rendered()
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
            answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == (200 if asks else 400), answer.text
        assert (rendered() > before) is asks


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}], ids=["plain", "tools"])
async def test_under_load_a_prefix_has_a_home_and_a_hot_one_has_all(
    cluster: ClusterProcess, more: dict[str, Any]
) -> None:
    """Prefixes come one after the other, twelve requests each, as few-shot benchmarks send them."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        places = asyncio.Semaphore(64)

        async def computed(subject: str, number: int, tokens: int = 8) -> bool:
            """Whether the prefix was computed."""
            content = f"Tell me all about {subject}. " * 40 + f"What of number {number}?"
            body = {
                "messages": [{"role": "user", "content": content}],
                "max_tokens": tokens,
                "ignore_eos": True,
            }
            async with places:
                usage = (await client.post("/v1/chat/completions", json=body | more)).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"] * 3 / 4

        subjects = ("bread", "cheese", "apples", "pears", "plums", "grapes", "beans", "onions")
        asked = [computed(subject, number) for subject in subjects for number in range(12)]
        times = sum(await asyncio.gather(*asked)) / len(subjects)
        assert times < 3, f"each prefix was computed {times} times, of {REPLICAS}"
        # longer answers, so that a replica has some of them at a time however fast it is
        await asyncio.gather(*(computed("honey", number, 24) for number in range(96)))
        before = cluster.prompts()
        await asyncio.gather(*(computed("honey", number, 24) for number in range(96)))
        shares = [after - before for after, before in zip(cluster.prompts(), before, strict=True)]
        assert min(shares) > sum(shares) / 16, f"a prefix that all ask for: {shares} tokens of prompts"


@pytest.mark.slow
async def test_a_killed_replica_costs_its_own_streams_alone_and_comes_back(cluster: ClusterProcess) -> None:
    victim = random.choice(cluster.workers())
    answers = await under_load(cluster, 48, lambda: os.kill(victim, signal.SIGKILL))
    whole = [number for number, (status, _) in enumerate(answers) if status == 200]
    broken = [number for number, (status, _) in enumerate(answers) if status != 200]
    assert all(answers[number][0] == 0 for number in broken), [answers[number] for number in broken]
    assert all(number % 2 == 0 for number in broken), "only what had begun to stream"
    assert len(broken) <= 4, "a replica runs four at a time"
    assert len(whole) + len(broken) == 48
    cluster.wait_for(lambda: "ended with status -9: again" in cluster.printed)
    cluster.wait_for(lambda: cluster.healthy() == REPLICAS)


@pytest.mark.slow
async def test_replicas_are_replaced_without_a_failed_request(cluster: ClusterProcess) -> None:
    tables, stop = cluster.printed.count("serving on"), threading.Event()
    cluster.process.send_signal(signal.SIGHUP)

    def watch() -> None:
        cluster.wait_for(lambda: cluster.printed.count("serving on") > tables)
        stop.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    answers = []
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        while not stop.is_set():
            answers += await asyncio.gather(*(ask(client, number, 30) for number in range(4)))
    watcher.join()
    assert {status for status, _ in answers} == {200}, [answer for answer in answers if answer[0] != 200]
    assert cluster.printed.count("replacing worker-") == REPLICAS


@pytest.mark.slow
async def test_it_ends_when_what_runs_is_finished(cluster: ClusterProcess) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        # long enough that all are seen to run together
        running = [asyncio.create_task(ask(client, number, 1500)) for number in range(4)]
        while sum(await asyncio.to_thread(cluster.counted, "qwen_running_sequences")) < len(running):
            assert not any(task.done() for task in running)
        workers = cluster.workers()
        cluster.process.terminate()
        assert [status for status, _ in await asyncio.gather(*running)] == [200] * 4
    assert await asyncio.to_thread(cluster.process.wait, 60) == 0
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


REPLICA = """
import http.server, pathlib, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
if pathlib.Path(sys.argv[2]).exists():
    sys.exit("the file is broken")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def test_replacing_stops_at_the_first_that_does_not_come_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken, first = tmp_path / "broken", free_ports(4)

    def child(name: str, port: int) -> Child:
        (log := tmp_path / f"{name}.log").touch()
        return Child(name, [sys.executable, "-c", REPLICA, str(port), str(broken)], port, log)

    replicas = [child(f"worker-{i}", first + i) for i in range(3)]
    router = child("router", first + 3)
    cluster = Cluster(replicas, router)
    try:
        for each in (*replicas, router):
            each.start()
            cluster._wait(each)  # noqa: SLF001 - a turn of what run() does
        kept = [each.process for each in (*replicas[1:], router)]
        broken.touch()
        cluster._reload.set()  # noqa: SLF001 - likewise
        cluster._supervise()  # noqa: SLF001 - likewise
        assert [each.process for each in (*replicas[1:], router)] == kept
        wait_until(lambda: all(each.answers() for each in (*replicas[1:], router)))
        assert "not replaced: worker-1, worker-2" in capfd.readouterr().err
        broken.unlink()
        cluster._supervise()  # noqa: SLF001 - likewise
        cluster._wait(replicas[0])  # noqa: SLF001 - a turn of what run() does
    finally:
        for each in (*replicas, router):
            each.end()


LAUNCHER = """
import pathlib, sys
from qwen_serve.server.cluster import Child, Cluster
folder, first = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def child(name, port):
    (log := folder / name).touch()
    return Child(name, [sys.executable, "-c", sys.argv[3], str(port), str(folder / "none")], port, log)

Cluster([child("worker-0", first), child("worker-1", first + 1)], child("router", first + 2)).run()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells a child of its parent's death")
def test_a_killed_launcher_takes_its_children_along(tmp_path: Path) -> None:
    first = free_ports(3)
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), str(first), REPLICA]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids: list[int] = []
        for line in launcher.stdout:
            pids += map(int, re.findall(r"(?:worker-\d|router) +\S+ +\d+ +(\d+) +(?:ready|waits)", line))
            if "serving on" in line:
                break
        launcher.kill()
    assert len(pids) == 3
    try:
        assert all(map(ends, pids)), "they run without a launcher"
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def test_cards_must_be_as_many_as_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replicas", "2", "--gpus", "0,1,2"]) == 2
    assert "--gpus 0,1,2: 3 cards for 2 replicas" in capsys.readouterr().err


def test_a_replica_that_does_not_come_up_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qwen_serve.server.cluster", "--replicas", "1", "--logs", str(tmp_path)]
    command += ["--port", str(free_port()), "--worker-port", str(free_port()), "--model", "none.gguf"]
    done = run(command)
    assert done.returncode == 1
    assert "worker-0 ended before it answered" in done.stderr
    assert "none.gguf" in done.stderr
