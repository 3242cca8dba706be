"""`python -m qwen_serve.server` as a child process on a free port, or the same in this process."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from qwen_serve.server.__main__ import load
from qwen_serve.server.api import Backend, Service, create_app
from qwen_serve.server.engine import Engine
from qwen_serve.server.engine.settings import ForcedSettings
from qwen_serve.server.settings import Settings
from tests.server.api.conftest import running
from tests.waiting import wait_until

START_S = 120

EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
"""With F32 weights: the same request gives the same tokens in any company."""


class ServerProcess:
    """A running server, which is killed at the end of its context at the latest. Its log is read as it
    arrives."""

    module = "qwen_serve.server"

    def __init__(self, *arguments: str | Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QWEN_")}
        self.process = subprocess.Popen(
            self.command([*map(str, arguments)]),
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def command(self, arguments: list[str]) -> list[str]:
        """The command line that starts it."""
        return [sys.executable, "-m", self.module, "--port", "0", "--threads", "1", *arguments]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    @property
    def url(self) -> str:
        """The server's address, from its log."""
        found = self.wait_for(lambda: re.search(r"listening on (https?://[^\s;]+)", self.log))
        return str(found[1])

    def wait_for(self, condition: Any, timeout: float = START_S) -> Any:
        """Wait for the first true value of `condition` and return it. Fails if the server ends, or after the
        time limit."""

        def met() -> Any:
            value = condition()
            assert value or self.process.poll() is None, self.log
            return value

        return wait_until(met, timeout, lambda: self.log)

    def wait_ready(self) -> str:
        """Wait until /ping answers 200. Returns the address."""
        self.wait_for(lambda: httpx.get(f"{self.url}/ping", timeout=START_S).status_code == 200)
        return self.url

    def client(self) -> httpx.Client:
        """Wait until the server is ready. Returns a client."""
        return httpx.Client(base_url=self.wait_ready(), timeout=120)

    def wait(self, timeout: float = 60) -> int:
        """Its exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def certificate(folder: Path, *names: str) -> tuple[Path, Path]:
    """A new one for 127.0.0.1 and hosts of these names, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    pem, key = folder / "certificate.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", ",".join(["subjectAltName=IP:127.0.0.1", *names])]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", key, "-out", pem], check=True, capture_output=True)
    return pem, key


@contextmanager
def served(*arguments: str | Path) -> Iterator[httpx.Client]:
    """A client of a server that is ready."""
    with ServerProcess(*arguments) as server, server.client() as client:
        yield client


@dataclass
class Served:
    """Where it listens, and what answers."""

    url: str
    service: Service

    @property
    def backend(self) -> Backend:
        return self.service.backend

    @property
    def engine(self) -> Engine:
        return self.backend.engine


@contextmanager
def serving(model: Path, **options: Any) -> Iterator[Served]:
    """In this process: greedy, in F32, so that answers can be compared; with what only tests force."""
    forced = {name: options.pop(name) for name in list(options) if name in ForcedSettings.model_fields}
    exact = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
    defaults = {**exact, "threads": 1, "parallel": 6, "ctx_size": 8192, "greedy": True, "alias": "nano"}
    settings = Settings(model=model, **{**defaults, **options})
    app = create_app(settings, lambda: load(settings, **forced))
    with running(app, settings) as url:
        service = app.state.service
        wait_until(lambda: service.status != "loading", 120)
        assert service.backend  # raises where it could not be loaded
        yield Served(url, service)
