"""`python -m tests.server.watched`: the server, with a watchdog on its event loop.

GET /watchdog answers with the longest time, in ms, for which the loop did nothing else since it was last
asked, and the process's memory in MiB. Time for which the loop's thread only waited for one of the machine's
cores, or the whole process did not compute, does not count: then others had them.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

import qwen_serve.server.__main__ as program

TICK_S = 0.002


class Watchdog:
    def __init__(self) -> None:
        self.worst = 0.0

    async def run(self) -> None:
        with Path("/proc/thread-self/schedstat").open() as statistics:

            def waited() -> float:
                """Seconds for which this thread was runnable but had no core."""
                statistics.seek(0)
                return int(statistics.read().split()[1]) / 1e9

            while True:
                began, computed, queued = time.perf_counter(), time.process_time(), waited()
                await asyncio.sleep(TICK_S)  # how late it wakes is the measure
                gap = time.perf_counter() - began - TICK_S - (waited() - queued)
                self.worst = max(self.worst, min(gap, time.process_time() - computed))

    def take(self) -> float:
        worst, self.worst = self.worst, 0.0
        return worst * 1000


def resident_mib() -> dict[str, float]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) / 1024 for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


def create_app(*arguments: Any) -> FastAPI:
    app = original(*arguments)
    watchdog = Watchdog()
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def watched(app: FastAPI) -> AsyncIterator[Any]:
        task = asyncio.create_task(watchdog.run())
        async with lifespan(app) as state:
            yield state
        task.cancel()

    app.router.lifespan_context = watched

    @app.get("/watchdog")
    async def report() -> dict[str, Any]:
        return {"blocked_ms": watchdog.take(), "resident_mib": resident_mib()}

    return app


original = program.create_app  # type: ignore[attr-defined]
program.create_app = create_app  # type: ignore[attr-defined, assignment]

if __name__ == "__main__":
    program.main()
