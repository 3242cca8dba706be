"""A server with the part of the Hugging Face hub's protocol that downloading a model needs."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from tests import http_server

REPO, COMMIT = "Someone/Tiny-1B", "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Serves one model: its metadata under /api, its files under /<repo>/resolve/<revision>."""

    folder: Path
    asked: list[tuple[str, str, str]]
    """(method, path, range) of each request."""
    claimed_bytes: int | None = None
    """What a large model would say of each file."""
    breaks_after: int | None = None
    """Bytes of an answer after which the connection is cut, once."""
    damages: str | None = None
    """A file that comes with another byte than its sha256 is of."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append((self.command, path, self.headers.get("Range", "")))
        resolved = re.fullmatch(f"/{REPO}/resolve/(?:{COMMIT}|main)/(.+)", path)
        if path == f"/api/models/{REPO}/tree/{COMMIT}":
            self.answer_json(
                [{"type": "file", "path": name, "size": n, "oid": ""} for name, n in self.files()]
            )
        elif path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
            siblings = [{"rfilename": name, "size": n, "lfs": self.lfs(name, n)} for name, n in self.files()]
            self.answer_json({"id": REPO, "sha": COMMIT, "siblings": siblings})
        elif resolved and (file := self.folder / resolved[1]).is_file():
            headers = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            data = file.read_bytes()
            if resolved[1] == self.damages:
                data = bytes([data[0] ^ 1]) + data[1:]
            self.answer(data, headers)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def lfs(self, name: str, n_bytes: int) -> dict[str, Any] | None:
        if not name.endswith((".gguf", ".safetensors")):
            return None
        return {"sha256": _digest(self.folder / name), "size": n_bytes, "pointerSize": 134}

    def files(self) -> list[tuple[str, int]]:
        files = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return [
            (path.relative_to(self.folder).as_posix(), self.claimed_bytes or path.stat().st_size)
            for path in files
        ]

    def answer_json(self, value: Any) -> None:
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, body: bytes, headers: dict[str, str]) -> None:
        given = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(given[1]) if given else 0
        self.send_response(206 if given else 200)
        if given:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if self.command != "GET":
            return
        cut = type(self).breaks_after
        if cut is not None and cut < len(body) - start:
            type(self).breaks_after = None
            self.wfile.write(body[start : start + cut])
            self.close_connection = True
            return
        self.write(body[start:])

    def write(self, data: bytes) -> None:
        """Sends what the client asked for."""
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, type[Hub]]]:
    """A hub that serves the files in `folder` as a model, with settings for its failures."""
    handler = type("ThisHub", (Hub,), {"folder": folder, "asked": []})
    with http_server.serving(handler) as server:
        yield f"http://127.0.0.1:{server.server_port}", handler


@contextmanager
def in_place_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, bytes]
) -> Iterator[type[Hub]]:
    """Let the hub's client use a server with these files, and an empty cache in `folder`/hub."""
    for name, data in files.items():
        path = folder / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with serving(folder / "repository") as (endpoint, handler):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield handler


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
