"""An image is submitted to a service that drops connections, expires URLs and fails."""

import hashlib
import json
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from qwen_serve.bench.errors import BenchError, ServerError, UnreachableError
from qwen_serve.bench.gates.score import WORKLOAD, GateScore
from qwen_serve.bench.store import Run

ROOT = Path(__file__).parents[3]
NANO = ROOT / "models" / "nano"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "scripts"))
    import script
    from submission.rules import (
        LARGEST_IMAGE,
        checkpoint_parameters,
        gates_rule,
        offline_rule,
        parameters_rule,
        size_rule,
    )
    from submission.service import Service
    from submit import submit


class FakeService:
    """The service. `faults`: one for each request: a status, "drop", or None."""

    def __init__(self) -> None:
        self.faults: dict[str, list[int | str | None]] = {}
        self.asked: Counter[str] = Counter()
        self.registered: dict[str, Any] = {}
        self.parts: dict[int, bytes] = {}
        self.keys: list[str | None] = []
        self.state = ""
        self.valid: set[str] = set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self, status: int, body: Any = None, **headers: str) -> None:
                content = b"" if body is None else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def faulty(self, kind: str) -> bool:
                fake.asked[kind] += 1
                fault = (fake.faults.get(kind) or [None]).pop(0) if fake.faults.get(kind) else None
                if fault == "drop":
                    self.rfile.read(min(1000, int(self.headers["Content-Length"])))
                    self.connection.close()
                    self.close_connection = True
                elif fault is not None:
                    self.rfile.read(int(self.headers["Content-Length"]))
                    self.answer(int(fault), {"error": "as told"})
                return fault is not None

            def do_POST(self) -> None:
                fake.keys.append(self.headers.get("Authorization"))
                kind = re.sub(r"/s1$", "", self.path.replace("/submissions/s1/", "").lstrip("/"))
                if self.faulty(kind):
                    return
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if kind == "submissions":
                    fake.registered = body
                    self.answer(201, {"id": "s1"})
                elif kind == "urls":
                    made = {str(n): f"/upload/{n}/{fake.asked['urls']}" for n in body["parts"]}
                    fake.valid |= set(made.values())
                    self.answer(200, {"urls": {n: fake.url + path for n, path in made.items()}})
                elif kind == "complete":
                    whole = b"".join(fake.parts[part["number"]] for part in body["parts"])
                    etags = [hashlib.md5(fake.parts[part["number"]]).hexdigest() for part in body["parts"]]
                    right = [part["etag"] for part in body["parts"]] == etags
                    right &= hashlib.sha256(whole).hexdigest() == fake.registered["sha256"]
                    self.answer(200 if right else 409)
                elif kind == "submit":
                    fake.state = "queued"
                    self.answer(200, {"status": "queued"})

            def do_PUT(self) -> None:
                fake.keys.append(self.headers.get("Authorization"))
                if self.faulty("put"):
                    return
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path not in fake.valid:
                    self.answer(403)
                    return
                fake.parts[int(self.path.split("/")[2])] = content
                self.answer(200, ETag=hashlib.md5(content).hexdigest())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def fake() -> Iterator[FakeService]:
    made = FakeService()
    yield made
    made.close()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.tar.gz"
    path.write_bytes(os.urandom(2_500_000))
    return path


def service(fake: FakeService, attempts: int = 4) -> Service:
    return Service(fake.url, "secret", "team-7", attempts=attempts, longest=0.01)


def test_one_part(fake: FakeService, image: Path) -> None:
    told: list[int] = []
    assert service(fake).hand_in(image, "first", told.append) == "queued"
    assert fake.registered == {
        "team": "team-7",
        "name": "first",
        "size": 2_500_000,
        "sha256": hashlib.sha256(image.read_bytes()).hexdigest(),
        "parts": 1,
    }
    assert fake.parts == {1: image.read_bytes()}
    assert sum(told) == 2_500_000
    assert list(image.parent.iterdir()) == [image], "nothing is left of a finished upload"


def test_the_key_goes_to_the_service_alone(fake: FakeService, image: Path) -> None:
    service(fake).hand_in(image, "x", lambda _: None)
    assert Counter(fake.keys) == {"Bearer secret": 4, None: 1}


def test_many_parts_through_dropped_connections_expired_urls_and_errors(
    fake: FakeService, image: Path
) -> None:
    fake.faults = {
        "submissions": [500, 429],
        "put": ["drop", None, 403, None, 503],
        "urls": ["drop"],
        "complete": [502],
        "submit": ["drop", 500],
    }
    told: list[int] = []
    assert service(fake).hand_in(image, "x", told.append, part_size=1_000_000) == "queued"
    assert [len(fake.parts[number]) for number in (1, 2, 3)] == [1_000_000, 1_000_000, 500_000]
    assert sum(told) == 2_500_000, "what was sent in vain is not counted"
    assert fake.asked["put"] == 6


def test_the_same_command_goes_on(fake: FakeService, image: Path) -> None:
    fake.faults = {"put": [None, *["drop"] * 9]}
    with pytest.raises(UnreachableError, match="goes on from here"):
        service(fake).hand_in(image, "x", lambda _: None, part_size=1_000_000)
    assert list(fake.parts) == [1]
    fake.faults, fake.asked = {}, Counter()
    told: list[int] = []
    assert service(fake).hand_in(image, "x", told.append, part_size=1_000_000) == "queued"
    assert (fake.asked["submissions"], fake.asked["put"]) == (0, 2)
    assert sum(told) == 2_500_000


def test_another_image_begins_anew(fake: FakeService, image: Path) -> None:
    fake.faults = {"put": [None, *["drop"] * 9]}
    with pytest.raises(UnreachableError):
        service(fake).hand_in(image, "x", lambda _: None, part_size=1_000_000)
    image.write_bytes(b"another")
    fake.faults, fake.parts = {}, {}
    assert service(fake).hand_in(image, "x", lambda _: None) == "queued"
    assert fake.parts == {1: b"another"}


def test_a_refusal_is_not_asked_again(fake: FakeService, image: Path) -> None:
    fake.faults = {"submissions": [401]}
    with pytest.raises(ServerError, match="401"):
        service(fake).hand_in(image, "x", lambda _: None)
    assert fake.asked["submissions"] == 1


def test_nobody_there(image: Path) -> None:
    with pytest.raises(UnreachableError, match="submissions"):
        Service("http://127.0.0.1:9", "k", "t", attempts=2, longest=0.01).hand_in(image, "x", lambda _: None)


# --- the rules ---------------------------------------------------------------------------------------------


def gguf_of(path: Path, count: int) -> Path:
    writer = GGUFWriter(path, "qwen35")
    writer.add_tensor("a", np.zeros(count, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_parameters_of_all_files_together(tmp_path: Path) -> None:
    small, large = gguf_of(tmp_path / "a.gguf", 1000), gguf_of(tmp_path / "b.gguf", 50_000_000)
    rule = parameters_rule((small,), str(NANO))
    assert rule.kept
    assert rule.found.startswith("1,000 of ")
    assert not parameters_rule((small, large), str(NANO)).kept
    assert not parameters_rule((), str(NANO)).kept
    with pytest.raises(BenchError, match=r"no \*\.safetensors"):
        parameters_rule((small,), str(tmp_path))
    with pytest.raises(BenchError, match=r"^--original no-such: no such file or folder, and not a hub id"):
        parameters_rule((small,), "no-such")


def test_parameters_of_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is read from the snapshot that a conversion left in the hub's cache, without a network."""
    snapshot = tmp_path / "models--some--nano" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(NANO)
    (tmp_path / "models--some--nano" / "refs").mkdir()
    (tmp_path / "models--some--nano" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert checkpoint_parameters("some/nano") == checkpoint_parameters(str(NANO)) > 1e6


def test_the_newest_verdict_of_each_gate_counts(tmp_path: Path) -> None:
    def record(**scores: float) -> None:
        with Run.begin(tmp_path, "quality", settings={}) as run:
            for gate, score in scores.items():
                made = GateScore(gate, 100, 100, score, score - 0.01, score + 0.01, threshold=0.6)
                run.add("server", WORKLOAD, gate, 0, made.values())

    record(mmlu_pro=0.9, ifeval=0.5)
    assert gates_rule(tmp_path).found == "mmlu_pro: pass, ifeval: fail, gpqa_diamond: not measured"
    record(ifeval=0.9, gpqa_diamond=0.9)
    assert gates_rule(tmp_path).kept
    assert not gates_rule(None).kept


def test_a_large_image_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.tar.gz"
    with path.open("wb") as file:
        file.truncate(LARGEST_IMAGE + 1)
    assert not size_rule(path).kept


@pytest.mark.parametrize(
    ("states", "kept"), [(["starting", "healthy"], True), (["unhealthy", "-exited"], False)]
)
def test_it_must_start_without_a_network(
    tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch, states: list[str], kept: bool
) -> None:
    """With a stand-in for docker that prints a given output."""
    calls, queue = tmp_path / "calls", tmp_path / "states"
    queue.write_text("\n".join(states) + "\n")
    docker = tmp_path / "docker"
    docker.write_text(
        f"""#!/bin/sh
echo "$@" >> {calls}
case $1 in
load) echo "Loaded image: it:latest" ;;
run) echo c1 ;;
inspect)
    s=$(head -n 1 {queue}); sed -i 1d {queue}
    case $s in -*) echo "${{s#-}} x" ;; *) echo "running $s" ;; esac ;;
logs) echo "no model" ;;
esac
"""
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    rule = offline_rule(image, 10)
    assert rule.kept is kept
    lines = calls.read_text().splitlines()
    assert "run --detach --network none --gpus all it:latest serve" in lines
    assert lines[-1] == "rm --force c1"


# --- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["submit", *words])
        script.run(submit)

    return run


def test_the_command(
    command: Callable[..., None],
    fake: FakeService,
    image: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [str(image), "--skip", "gates,parameters,offline"]
    command(*words, "--check-only")
    assert not fake.asked
    with pytest.raises(SystemExit, match="SUBMIT_URL"):
        command(*words)
    for name, value in {"URL": fake.url, "KEY": "secret", "TEAM": "t"}.items():
        monkeypatch.setenv(f"SUBMIT_{name}", value)
    command(*words)
    assert "image.tar.gz: queued" in capsys.readouterr().out
    assert fake.state == "queued"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--skip", "offline"), "gates, parameters: not kept; nothing was uploaded"),
        (("--skip", "luck"), "--skip luck: want some of size"),
    ],
)
def test_a_broken_rule_keeps_it_here(
    command: Callable[..., None], image: Path, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        command(str(image), *words)


def test_an_image_that_is_not_there(command: Callable[..., None]) -> None:
    with pytest.raises(SystemExit, match="docker save"):
        command("nothing.tar.gz")
