"""An aiohttp server in a thread of its own, on a free port."""

import asyncio
import ssl
import threading
from types import TracebackType
from typing import Self

from aiohttp import web


class ServedInThread:
    """``with X(...) as server: ... server.url``. `make_app` makes the app to serve."""

    def __init__(self, port: int = 0) -> None:
        self.url = ""
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._started, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(),), daemon=True
        )

    ssl_context: ssl.SSLContext | None = None
    """That of a server that speaks TLS."""

    def make_app(self) -> web.Application:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        runner = web.AppRunner(self.make_app(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port, ssl_context=self.ssl_context).start()
        scheme = "https" if self.ssl_context else "http"
        self.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()
