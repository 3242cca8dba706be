"""A proxy in front of a server that breaks one rule of its contract."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession, web

from tests.in_thread import ServedInThread

Body = dict[str, Any]
PASSED_ON = ("Content-Type", "X-Request-Id", "Content-Security-Policy")


@dataclass
class Break:
    """Changes to requests, to whole answers and to events (None drops one). ``fail``: a status instead of an
    answer.
    """

    request: Callable[[str, Body], Body] = lambda _, body: body
    answer: Callable[[str, Body], Body] = lambda _, answer: answer
    event: Callable[[str, Body], Body | None] = lambda _, event: event
    fail: Callable[[str], int | None] = lambda _: None
    done: bool = True
    request_ids: bool = True


class Broken(ServedInThread):
    """``with Broken(url, Break(...)) as server: ... server.url``."""

    def __init__(self, url: str, how: Break) -> None:
        super().__init__()
        self._upstream, self._how = url, how

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        app.cleanup_ctx.append(self._with_session)
        return app

    async def _with_session(self, _: web.Application) -> AsyncIterator[None]:
        async with ClientSession() as self._session:
            yield

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        how, path = self._how, request.path
        if (status := how.fail(path)) is not None:
            error = {"message": "broken", "type": "server_error", "param": None, "code": None}
            return web.json_response({"error": error}, status=status)
        data = await request.read()
        if isinstance(body := _parsed(data), dict):
            data = json.dumps(how.request(path, body)).encode()
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        async with self._session.request(
            request.method, f"{self._upstream}{request.path_qs}", data=data, headers=headers
        ) as got:
            kept = {name: got.headers[name] for name in PASSED_ON if name in got.headers}
            if not how.request_ids:
                kept.pop("X-Request-Id", None)
            if got.content_type != "text/event-stream":
                data = await got.read()
                if isinstance(body := _parsed(data), dict):
                    data = json.dumps(how.answer(path, body)).encode()
                return web.Response(body=data, status=got.status, headers=kept)
            response = web.StreamResponse(headers=kept)
            await response.prepare(request)
            held = b""  # an event's name comes before its data
            async for line in got.content:
                if not line.startswith(b"data: "):
                    held += line
                    continue
                event: Any = _parsed(line[6:])
                changed = how.event(path, event) if event is not None else how.done or None
                written = line if event is None else b"data: " + json.dumps(changed).encode() + b"\n"
                if changed is not None:
                    await response.write(held + written)
                held = b""
            await response.write(held)
            return response


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
