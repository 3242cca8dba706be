"""Starts a server program with its output in a file, waits until it answers, and always stops it."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Self

import aiohttp

from qwen_serve.bench.errors import BenchError
from qwen_serve.common.children import sigterm_with_parent

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 3.0
LOG_LINES = 12


def search_path(variable: str, folder: Path) -> dict[str, str]:
    """Environment of a child process in which ``variable`` begins with ``folder``."""
    return {variable: os.pathsep.join(filter(None, [str(folder), os.environ.get(variable, "")]))}


PYTHON_PATH = search_path("PYTHONPATH", Path(__file__).resolve().parents[3])
"""Environment in which a child process finds this checkout's packages from any folder."""


class StartError(BenchError):
    """The program ended, or did not answer in time. The message ends with the log's last lines."""


@dataclass(kw_only=True)
class ServerProcess:
    """A server in a process group of its own, so that its children are stopped with it.

    ``async with ServerProcess(...) as server`` starts it and waits until ``ready_path`` of ``url`` answers
    200. Its output goes to ``log``. Without a ``command`` the server already runs: it is awaited, but never
    stopped. If it is not ready after PATIENCE_SECONDS, a line on stderr says why.
    """

    name: str = field(kw_only=False)
    command: list[str] = field(kw_only=False)
    url: str = field(kw_only=False)
    ready_path: str
    log: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    timeout: float = 300.0
    poll: float = POLL_SECONDS
    start_seconds: float = 0.0
    _process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Run the program and wait until it answers. If it does not, stop it and raise StartError."""
        began = perf_counter()
        if self.command:
            self._spawn()
        try:
            await self._answer(began + self.timeout)
        except BaseException:
            await self.stop()
            raise
        self.start_seconds = perf_counter() - began

    async def stop(self, patience: float = 10.0) -> None:
        """Send SIGTERM to the process group, and SIGKILL after ``patience`` seconds to what still runs."""
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            _signal(process.pid, signal.SIGTERM)
            until = perf_counter() + patience
            while process.poll() is None and perf_counter() < until:
                await asyncio.sleep(POLL_SECONDS)
        finally:  # also if this wait is cancelled
            _signal(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def running(self) -> bool:
        """Whether the program still runs; assumed for a server without a ``command``."""
        return not self.command or (self._process is not None and self._process.poll() is None)

    def tail(self) -> str:
        """The last lines of the log, indented."""
        if self.log is None or not self.log.is_file():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(f"    {line}" for line in lines)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _spawn(self) -> None:
        assert self.log is not None, "a program's output needs a file"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.environment},
                    start_new_session=True,
                    preexec_fn=sigterm_with_parent(),
                )
            except OSError as error:
                raise StartError(f"{self.name}: cannot run {self.command[0]}: {error.strerror}") from error

    async def _answer(self, until: float) -> None:
        timeout = aiohttp.ClientTimeout(total=5)
        tell_at = perf_counter() + PATIENCE_SECONDS if not self.command else math.inf
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                try:
                    async with session.get(self.url + self.ready_path) as response:
                        if response.status == 200:
                            return
                        state = f"{self.ready_path} answers {response.status}"
                except (aiohttp.ClientError, TimeoutError) as error:
                    state = f"cannot connect to {self.url}: {error}"
                if self._process is not None and (status := self._process.poll()) is not None:
                    raise StartError(f"{self.name} ended with status {status}; its log ends:\n{self.tail()}")
                if perf_counter() > until:
                    log = f"; its log ends:\n{self.tail()}" if self.command else ""
                    raise StartError(f"{self.name}: not ready within {self.timeout:g} s: {state}{log}")
                if perf_counter() > tell_at:
                    print(f"waiting for {self.name} up to {self.timeout:g} s: {state}", file=sys.stderr)
                    tell_at = math.inf
                await asyncio.sleep(self.poll)


def free_port() -> int:
    """A TCP port that is free on this machine now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
