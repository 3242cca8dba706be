"""Fetching from the hub, against a local server that speaks as much of its protocol as is needed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from gguf import GGUFReader

from tests.processes import run

ROOT = Path(__file__).parents[2]
REPO, COMMIT = "Someone/Tiny-1B", "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Serves one model: its metadata under /api, its files under /<repo>/resolve/<commit>."""

    folder: Path
    claimed_bytes: int | None = None  # what a large model would say of each shard

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == f"/api/models/{REPO}/tree/{COMMIT}":
            self.answer_json(
                [{"type": "file", "path": name, "size": n, "oid": ""} for name, n in self.files()]
            )
        elif path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
            siblings = [{"rfilename": name, "size": n} for name, n in self.files()]
            self.answer_json({"id": REPO, "sha": COMMIT, "siblings": siblings})
        elif (file := self.folder / path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")).is_file():
            data = file.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            self.answer(data, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def files(self) -> list[tuple[str, int]]:
        files = (path for path in sorted(self.folder.iterdir()) if path.is_file())
        return [(path.name, self.claimed_bytes or path.stat().st_size) for path in files]

    def answer_json(self, value: Any) -> None:
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[tuple[str, type[Hub]]]:
    handler = type("ThisHub", (Hub,), {"folder": checkpoint})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def convert(endpoint: str, repo: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    command = [
        sys.executable,
        "-m",
        "qwen_serve.convert",
        "--src",
        repo,
        "--quant",
        "F16",
        "--out",
        str(folder / "out"),
    ]
    return run(command, cwd=ROOT, env=environment)


def test_a_model_is_fetched_named_and_converted(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    done = convert(hub[0], REPO, tmp_path)
    assert done.returncode == 0, done.stderr
    fields = GGUFReader(tmp_path / "out" / "Tiny-1B-F16.gguf").fields
    assert fields["general.name"].contents() == "Tiny 1B"
    assert fields["general.organization"].contents() == "Someone"
    assert fields["general.source.url"].contents() == f"https://huggingface.co/{REPO}/tree/{COMMIT}"


def test_an_unknown_model(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    done = convert(hub[0], "Someone/Else", tmp_path)
    assert done.returncode == 1
    assert "error: --src Someone/Else: no such folder, and the hub knows no such model" in done.stderr


def test_a_download_larger_than_the_disk_is_not_begun(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    hub[1].claimed_bytes = 10**16
    done = convert(hub[0], REPO, tmp_path)
    assert done.returncode == 1
    assert f"error: --src {REPO}: 20,000 TB to download" in done.stderr
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
