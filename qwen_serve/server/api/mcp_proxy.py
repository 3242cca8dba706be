"""`/mcp-proxy`: passes the chat page's requests on to MCP servers, which browsers cannot reach by themselves.

Only origins in --mcp-origins are called, at the address that was compared with them. Redirects are not
followed, and size, time and number of calls are bounded. Keys come with each request and are neither kept nor
logged.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response

from qwen_serve.server.api.errors import ApiError, bad_request

PATH = "/mcp-proxy"
URL_HEADER = "Mcp-Url"
"""The MCP server's address; a custom header, which other sites' pages cannot send without asking."""
KEY_HEADER = "Mcp-Authorization"
"""Sent on as Authorization."""
PASSED = ("Content-Type", "Accept", "Mcp-Session-Id", "Mcp-Protocol-Version")
RETURNED = ("Mcp-Session-Id",)
TYPES = ("application/json", "text/event-stream")

MAX_BODY = 2**20
MAX_ANSWER = 2**22
CONNECT_S = 10.0
TOTAL_S = 120.0
AT_ONCE = 8
CHUNK = 2**16
SAID = 300
"""Most characters of another server's error."""

PORTS = {"http": 80, "https": 443}

Origin = tuple[str, str, int]
"""Scheme, host and port."""


def origin_of(url: str) -> Origin:
    """The origin of an http(s) URL. Raises ValueError for anything else, and for a URL with a user in it."""
    if not url.isascii() or any(char <= " " or char in '\\\x7f"<>^`{|}' for char in url):
        raise ValueError("it has characters that an address has not")
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname or "@" in parts.netloc:
        raise ValueError("want http:// or https://, a host and no user")
    return parts.scheme, parts.hostname.lower(), parts.port or PORTS[parts.scheme]


def install(app: FastAPI, origins: Collection[str]) -> None:
    """Adds the proxy for these origins, such as http://127.0.0.1:3001. Without any, it refuses requests."""
    allowed = {origin_of(origin) for origin in origins}
    slots = threading.BoundedSemaphore(AT_ONCE)

    @app.api_route(PATH, methods=["POST", "DELETE"], include_in_schema=False)
    async def pass_on(http: Request) -> Response:
        origin, target = _target(http.headers.get(URL_HEADER), allowed)
        body = b""
        async for chunk in http.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise ApiError(
                    413, f"a request to an MCP server has at most {MAX_BODY} bytes", code="too_large"
                )
        headers = {name: value for name in PASSED if (value := http.headers.get(name)) is not None}
        if key := http.headers.get(KEY_HEADER):
            headers["Authorization"] = key
        if not slots.acquire(blocking=False):
            raise ApiError(429, f"{AT_ONCE} requests to MCP servers run already", code="too_many_requests")
        return await _beside(partial(_call, origin, http.method, target, body, headers), slots)


async def _beside(call: Callable[[], Response], slots: threading.BoundedSemaphore) -> Response:
    """Runs a call in a thread, which gives its slot back when it ends, even if the client has left."""
    answered: Future[Response] = Future()
    answered.set_running_or_notify_cancel()  # so that a client who leaves does not cancel it

    def run() -> None:
        try:
            try:
                response = call()
            finally:  # before the client is answered, who may call again at once
                slots.release()
            answered.set_result(response)
        except Exception as error:
            answered.set_exception(error)

    threading.Thread(target=run, name="mcp-proxy", daemon=True).start()
    return await asyncio.wrap_future(answered)


def _target(url: str | None, allowed: Collection[Origin]) -> tuple[Origin, str]:
    """The origin, and what follows it. Raises ApiError unless the origin is allowed."""
    if not allowed:
        raise ApiError(403, "MCP servers are off: --mcp-origins names those to call", code="mcp_off")
    if url is None:
        raise bad_request(URL_HEADER, "this header is missing: the MCP server's address")
    try:
        origin = origin_of(url)
    except ValueError as error:
        raise bad_request(URL_HEADER, str(error)) from None
    if origin not in allowed:
        raise ApiError(403, f"{URL_HEADER}: this origin is not one of --mcp-origins", code="mcp_not_allowed")
    parts = urlsplit(url)
    return origin, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _call(origin: Origin, method: str, target: str, body: bytes, headers: dict[str, str]) -> Response:
    scheme, host, port = origin
    if scheme == "https":
        connection: HTTPConnection = HTTPSConnection(
            host, port, timeout=CONNECT_S, context=ssl.create_default_context()
        )
    else:
        connection = HTTPConnection(host, port, timeout=CONNECT_S)
    late = threading.Event()
    try:
        connection.connect()
        timer = threading.Timer(TOTAL_S, _end, [connection.sock, late])
        timer.daemon = True
        connection.sock.settimeout(None)
        timer.start()
        try:
            connection.request(method, target, body, {**headers, "Accept-Encoding": "identity"})
            return _answer(connection.getresponse(), late)
        finally:
            timer.cancel()
    except (OSError, HTTPException, ValueError) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            message = f"the MCP server did not answer within {TOTAL_S:g} s"
            raise ApiError(504, message, code="mcp_timeout") from None
        why = getattr(error, "strerror", None) or error
        raise ApiError(502, f"the MCP server cannot be reached: {why}", code="mcp_unreachable") from None
    finally:
        connection.close()


def _end(connected: socket.socket, late: threading.Event) -> None:
    """Ends a connection whose time is up, however slowly it sends."""
    late.set()
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _answer(response: HTTPResponse, late: threading.Event) -> Response:
    status = response.status
    if 300 <= status < 400:
        raise ApiError(502, "the MCP server redirects, which is not followed", code="mcp_redirect")
    if response.getheader("Content-Encoding", "identity") != "identity":
        raise ApiError(502, "the MCP server's answer is compressed", code="mcp_answer")
    data = b""
    while chunk := response.read1(CHUNK):
        data += chunk
        if len(data) > MAX_ANSWER:
            raise ApiError(
                502, f"the MCP server's answer has more than {MAX_ANSWER} bytes", code="mcp_answer"
            )
    if late.is_set():
        raise TimeoutError
    kind = response.getheader("Content-Type", "").partition(";")[0].strip().lower()
    if status >= 400:
        said = data[:SAID].decode("utf-8", "replace")
        message = f"the MCP server answered {status} {response.reason}: {said}"
        raise ApiError(404 if status == 404 else 502, message, code=f"mcp_{status}")
    if data and kind not in TYPES:
        raise ApiError(502, f"the MCP server answered with {kind or 'no type'}, not JSON", code="mcp_answer")
    headers = {name: value for name in RETURNED if (value := response.getheader(name)) is not None}
    headers |= {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return Response(data, status, headers, media_type=kind if data else None)
