"""A client for servers with OpenAI's API that records when each piece of a stream arrives.

Times are ``time.perf_counter`` seconds. A request's time runs from handing the encoded bytes to the
connection until the last byte of the answer arrives; it does not include encoding the body.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import aiohttp
from pydantic_core import from_json

from qwen_serve.bench.errors import BenchError, ServerError, UnreachableError

# uvicorn and llama-server close a connection that is idle for 5 s.
KEEP_ALIVE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response of any status, unchanged."""

    status: int
    headers: Mapping[str, str]
    text: str
    seconds: float

    def json(self) -> Any:
        """The decoded body. Raises ServerError if it is not JSON."""
        with suppress(ValueError):  # lone surrogates
            return from_json(self.text)  # four times as fast: answers that arrive meanwhile wait for this
        try:
            return json.loads(self.text)
        except ValueError as error:
            raise ServerError(
                f"the answer (status {self.status}) is not JSON: {clip(self.text)}", self.status
            ) from error


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's token counts. ``cached_tokens``: None if it does not report them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation. ``arrivals``: seconds from the start to each streamed piece of text. ``calls``:
    names and arguments of the tools that it calls."""

    text: str
    reasoning: str
    finish_reason: str | None
    usage: Usage | None
    started: float
    seconds: float
    arrivals: list[float] = field(default_factory=list)
    calls: str = ""

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of each token after the first, in seconds; None with fewer than two tokens or pieces."""
        if self.usage is None or self.usage.completion_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.usage.completion_tokens - 1)


class Client:
    """Client of one server: ``async with Client(url) as client``. Connections are unlimited and kept alive.

    ``timeout``: limit of a whole request, in seconds. A ``/v1`` at the end of ``url`` is removed, since paths
    begin with it.
    """

    def __init__(self, url: str, *, timeout: float = 600.0, api_key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise BenchError(f"--url {url}: want http://host:port or https://host:port")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_mark_reused)
        self._session = aiohttp.ClientSession(
            trace_configs=[trace],
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            headers=self._headers,
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send ``body`` as JSON, or ``data`` unchanged. Raises UnreachableError if there is no response."""
        started, response = await self._send(method, path, body, data, headers)
        async with response:
            try:
                raw = await response.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                raise self._unreachable(path, error) from error
            seconds = perf_counter() - started
            return Reply(response.status, response.headers, raw.decode("utf-8", "replace"), seconds)

    async def complete(self, path: str, body: Mapping[str, Any]) -> Completion:
        """Generate without streaming. ``body`` has ``prompt`` or ``messages``, which decides the response's
        format.

        Raises ServerError for a status other than 200 or a body without a choice.
        """
        started = perf_counter()
        reply = await self.request("POST", path, body=body)
        if reply.status != 200:
            raise ServerError(f"POST {path} answered {reply.status}: {error_text(reply)}", reply.status)
        answer = reply.json()
        try:
            choice = answer["choices"][0]
            message = choice.get("message")
            return Completion(
                text=choice["text"] if message is None else message.get("content") or "",
                reasoning="" if message is None else reasoning_of(message),
                finish_reason=choice.get("finish_reason"),
                usage=read_usage(answer),
                started=started,
                seconds=reply.seconds,
                calls="".join(map(_called, (message or {}).get("tool_calls") or ())),
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(f"POST {path}: no completion in the answer: {clip(reply.text)}", 200) from error

    async def stream(self, path: str, body: Mapping[str, Any]) -> Completion:
        """Generate with streaming and usage. Raises ServerError as `complete` does, or if the stream breaks
        off.
        """
        text: list[str] = []
        reasoning: list[str] = []
        calls: list[str] = []
        arrivals: list[float] = []
        finish_reason: str | None = None
        usage: Usage | None = None
        last = 0.0
        done = False
        started = perf_counter()
        async for at, data in self.events(
            path, {**body, "stream": True, "stream_options": {"include_usage": True}}
        ):
            last = at
            if data == "[DONE]":
                done = True  # read on to the end: only then can the connection be reused
                continue
            chunk = _decode_event(path, data)
            usage = read_usage(chunk) or usage
            for choice in chunk.get("choices") or []:
                delta = choice.get("delta") or {}
                piece = choice.get("text") or delta.get("content") or ""
                thought = reasoning_of(delta)
                if piece or thought or delta.get("tool_calls"):
                    arrivals.append(at)
                calls += map(_called, delta.get("tool_calls") or ())
                text.append(piece)
                reasoning.append(thought)
                finish_reason = choice.get("finish_reason") or finish_reason
        if not done:
            raise ServerError(f"POST {path}: the stream ended without [DONE]", 200)
        return Completion(
            "".join(text), "".join(reasoning), finish_reason, usage, started, last, arrivals, "".join(calls)
        )

    async def events(self, path: str, body: Any) -> AsyncGenerator[tuple[float, str], None]:
        """The stream's events as they arrive: (seconds since the request was sent, text after ``data:``).

        Closing the iterator closes the connection (`contextlib.aclosing`). Raises ServerError for a status
        other than 200 or another content type.
        """
        started, response = await self._send("POST", path, body, None, {"Accept": "text/event-stream"})
        async with response:
            if response.status != 200:
                raw = (await response.read()).decode("utf-8", "replace")
                reply = Reply(response.status, response.headers, raw, perf_counter() - started)
                raise ServerError(f"POST {path} answered {reply.status}: {error_text(reply)}", reply.status)
            if response.content_type != "text/event-stream":
                raise ServerError(
                    f"POST {path}: want text/event-stream, got {response.content_type or 'no content type'}",
                    200,
                )
            pending = b""
            try:
                async for block in response.content.iter_any():
                    at = perf_counter() - started
                    *lines, pending = (pending + block).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data:"):
                            yield at, line[5:].strip().decode("utf-8", "replace")
                if pending.startswith(b"data:"):
                    yield perf_counter() - started, pending[5:].strip().decode("utf-8", "replace")
            except (aiohttp.ClientError, TimeoutError) as error:
                raise self._unreachable(path, error) from error

    async def model(self) -> str | None:
        """The id of the first model in /v1/models; None if the server has none or no such endpoint."""
        reply = await self.request("GET", "/v1/models")
        try:
            return str(reply.json()["data"][0]["id"]) if reply.status == 200 else None
        except (ServerError, LookupError, TypeError):
            return None

    async def _send(
        self, method: str, path: str, body: Any, data: bytes | None, headers: Mapping[str, str] | None
    ) -> tuple[float, aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("Client is used outside `async with`")
        sent = dict(headers or {})
        if body is not None:
            data = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        connection: dict[str, bool] = {}
        while True:
            started = perf_counter()
            try:
                return started, await self._session.request(
                    method, self.url + path, data=data, headers=sent, trace_request_ctx=connection
                )
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                # A server may close a reused connection while the request is written (llama-server does after
                # # every fifth request). No answer has begun, so the request is sent and timed again.
                lost = isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError)
                if not (lost and connection.pop("reused", False)):
                    raise self._unreachable(path, error) from error

    def _unreachable(self, path: str, error: BaseException) -> UnreachableError:
        if isinstance(error, asyncio.TimeoutError):
            return UnreachableError(f"{self.url}{path}: no answer within {self.timeout:g} s (--timeout)")
        if isinstance(error, aiohttp.ClientConnectorError):
            return UnreachableError(f"{self.url}: cannot connect ({error.os_error}); is the server up?")
        return UnreachableError(f"{self.url}{path}: the connection broke: {error or type(error).__name__}")


async def _mark_reused(_: object, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx["reused"] = True


def read_usage(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of a response or a stream's chunk; None without one. Raises ServerError if it is
    malformed."""
    usage = answer.get("usage")
    if not usage:
        return None
    try:
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return Usage(int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0), cached)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"malformed usage in the answer: {clip(json.dumps(usage))}", 200) from error


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning in a message or delta: ``reasoning_content``, or ``reasoning`` as newer vLLM calls it."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def error_text(reply: Reply) -> str:
    """The server's error message: from OpenAI's error object if there is one, else the body."""
    try:
        return str(json.loads(reply.text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return clip(reply.text) or "(empty body)"


def clip(text: str, limit: int = 200) -> str:
    """The text on one line, cut to ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _called(call: Mapping[str, Any]) -> str:
    """What a whole tool call, or a piece of one, says; without its id, which is always new."""
    function = call.get("function") or {}
    return f"{function.get('name') or ''}{function.get('arguments') or ''}"


def _decode_event(path: str, data: str) -> Mapping[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise ServerError(f"POST {path}: an event is not JSON: {clip(data)}", 200) from error
    if not isinstance(chunk, dict):
        raise ServerError(f"POST {path}: an event is not an object: {clip(data)}", 200)
    if "error" in chunk:
        failure = chunk["error"]
        message = failure.get("message") if isinstance(failure, dict) else failure
        raise ServerError(f"POST {path}: the stream broke off: {message}", 200)
    return chunk
