"""One client's connection: uvicorn's, with limits on size, slowness and number.

uvicorn has no settings for these limits, an ASGI layer sees a request only once its head is complete, and a
proxy is optional. Each limit has a test in tests/server/api/test_connection.py that fails on uvicorn's own
protocol:

- httptools counts neither headers nor the framing of chunks (h11 does, and costs more for each event):
  `test_what_surrounds_a_body_has_a_limit`, `test_a_trailer_is_no_header`.
- uvicorn times out idle connections only: `test_headers_that_do_not_come`, `test_a_body_that_does_not_come`.
- `limit_concurrency` also refuses probes, and never closes an idle connection:
  `test_connections_have_a_limit`.
- After an offer to upgrade the body is dropped: `test_an_offer_to_upgrade_is_passed_over`.
- A stream is sent in chunks to HTTP/1.0, which has none: `test_a_stream_for_http_1_0_has_no_chunks`.
- Input that is not HTTP, or names no valid host, is answered in plain text or reaches the app, and complete
  requests before it are not answered: `test_what_is_no_http`, `test_one_host`,
  `test_what_is_refused_behind_a_request_leaves_it_its_answer`.
"""

import asyncio
import json
import logging
import os
import re
import resource
from itertools import chain
from typing import Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from qwen_serve.server.api.errors import ApiError, from_exception
from qwen_serve.server.api.middleware import PROBES
from qwen_serve.server.settings import Settings

logger = logging.getLogger(__name__)

SLICE = 16 * 1024
"""Bytes of headers that are parsed before they are counted."""

MAX_HEADERS = 256

HOST = re.compile(rb"[^\s,/?#@\\]*")
"""Characters of a host name or address and its port; `KnownSites` decides which hosts are allowed."""

LINGER_S = 2.0
"""Seconds in which input from a refused client is read and dropped. If the socket were closed at once, the
client's system could discard the refusal before the client reads it."""

FOR_PROBES = 16
"""Connections beyond the limit, for health checks only, so that they can tell a busy server from a dead
one."""

RESERVED_DESCRIPTORS = 32
"""File descriptors reserved for the model's file, the log and libraries."""


class BoundedConfig(uvicorn.Config):
    """uvicorn's settings and those of this module. There are at most as many connections as file
    descriptors."""

    def __init__(self, app: Any, settings: Settings, **options: Any) -> None:
        super().__init__(app, http=BoundedProtocol, ws="none", **options)
        self.settings = settings
        self.max_header_bytes = settings.max_header_kib * 1024
        self.max_connections = max(1, min(settings.max_connections, free_descriptors() - FOR_PROBES))
        self.idle: dict[BoundedProtocol, None] = {}
        """Idle connections; the first has been idle for longest."""
        self.unread: dict[BoundedProtocol, None] = {}
        """Connections whose current request has an incomplete body, in the order of their heads."""


def free_descriptors() -> int:
    """File descriptors left for connections, after raising the process's soft limit to its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened = len(os.listdir("/dev/fd"))  # noqa: PTH208 - descriptors, not files
    return hard - opened - RESERVED_DESCRIPTORS if hard != resource.RLIM_INFINITY else 2**20


def end_by_closing(cycle: RequestResponseCycle) -> None:
    """Ends the answer with the connection: HTTP/1.0 has no chunks (RFC 9112, section 6.1)."""
    framed = cycle.send

    async def send(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await framed(message)

    cycle.chunked_encoding = False
    cycle.send = send  # type: ignore[method-assign]


class BoundedProtocol(HttpToolsProtocol):
    """Reads a request in three phases: "idle" until its first byte arrives, then "head", then "body".

    Everything but the body (headers, the framing of chunks, trailers) may take `max_header_bytes` and, if the
    body is chunked, as many more bytes as the body has.
    """

    config: BoundedConfig

    # --- connections -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts the connection. Above the limit, it replaces a connection that waits for its client; if
        there is none, it serves health checks only."""
        self._phase = "head"  # a new connection's first request has as much time as any head
        self._timed: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._received = self._body = 0
        self._active: RequestResponseCycle | None = None
        self._later = bytearray()
        self._refused = self._for_probes = False
        self._refusal: ApiError | None = None
        super().connection_made(transport)
        most = self.config.max_connections
        if len(self.connections) > most and not self._replace():
            logger.warning("%d connections are open, as many as there may be: one more gets 503", most)
            if len(self.connections) > most + FOR_PROBES:
                self._refuse_connection()
                return
            self._for_probes = True
        self._rank()
        self._time()

    def _refuse_connection(self) -> None:
        self.refuse(ApiError(503, "too many connections", code="too_many_connections"))

    def _replace(self) -> bool:
        """Closes the connection that has been idle for longest, or one whose request is incomplete. Returns
        whether there was one."""
        oldest = next(chain(self.config.idle, self.config.unread), None)
        if oldest is None:
            return False
        oldest._unrank()
        most = self.config.max_connections
        logger.warning("%d connections are open, as many as there may be: an idle one is closed", most)
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def _rank(self) -> None:
        """Makes this connection the last candidate for replacement, if it is one."""
        self._unrank()
        if not self.busy:
            self.config.idle[self] = None
        elif self.unread:
            self.config.unread[self] = None

    def _unrank(self) -> None:
        self.config.idle.pop(self, None)
        self.config.unread.pop(self, None)

    @property
    def unread(self) -> bool:
        """Whether the current request's body is incomplete."""
        return self.busy and self._phase == "body" and self._active is self.cycle

    def drop_unread(self) -> None:
        """Refuses the incomplete request, as if its head had arrived while the server drains."""
        if self.unread and not self.cycle.response_started:
            self.refuse(ApiError(503, "the server is shutting down", code="draining"))

    @property
    def busy(self) -> bool:
        return self._active is not None and not self._active.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies every request of the connection, not only the newest."""
        super().connection_lost(exc)
        self._unrank()
        self._stop_timer()
        if self._active is not None and self._active is not self.cycle:
            self._active.disconnected = True
            self._active.message_event.set()

    # --- what is received ----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parses in slices. Data after a pipelined request is not parsed, so that the server keeps
        reading."""
        for start in range(0, len(data), SLICE):
            if self._refused or self.transport.is_closing() or self.parser is None:
                return
            if self.pipeline:
                self._put_off(data[start:])
                break
            part = data[start : start + SLICE] if len(data) > SLICE else data
            self._received += len(part)
            self._parse(part)
            if self._received - self._body > self.config.max_header_bytes + self._body:
                self._refuse_head(f"a request may have {self.config.max_header_bytes:,} bytes of headers")
        if self.pipeline:
            self.flow.resume_reading()  # otherwise a disconnect goes unnoticed
        self._time()

    def _parse(self, data: bytes) -> None:
        """uvicorn's `data_received`, except that an offer to upgrade is ignored (RFC 9110, section 7.8).

        llhttp treats the offer as accepted: it drops the body, or reads it as the next request.
        """
        self._unset_keepalive_if_required()
        try:
            while True:
                try:
                    self.parser.feed_data(data)
                    return
                except HttpParserUpgrade as offer:
                    data = data[offer.args[0] :]
                    self._read_without_offer()
        except HttpParserError as error:
            if isinstance(error.__context__, MemoryError):  # raised in a callback, not the client's fault
                logger.error("a request was not read: out of memory")
                self.refuse(from_exception(error.__context__))
                return
            self.send_400_response("this is not HTTP/1.1, or not as RFC 9112 has it")

    def _read_without_offer(self) -> None:
        """Parses the request's head again with a fresh parser, without the offer that stopped the last
        one."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")

    def _put_off(self, data: bytes) -> None:
        self._later += data
        if len(self._later) > self.config.max_header_bytes:
            self.transport.abort()

    def _refuse_head(self, message: str) -> None:
        self.refuse(ApiError(431, message, code="headers_too_large"))

    def _check_head(self) -> None:
        """Refuses a head with an unsupported method or version or a wrong Host, and stops the parser."""
        hosts = [value for name, value in self.headers if name == b"host"]
        if self.parser.get_method() == b"CONNECT":
            self.refuse(ApiError(501, "CONNECT: this server is no proxy", code="not_supported"))
        elif (version := self.parser.get_http_version()) not in ("1.0", "1.1"):
            message = f"HTTP/{version}: this server speaks HTTP/1.1"
            self.refuse(ApiError(505, message, code="not_supported"))
        elif self._for_probes and self.url.decode("latin-1").partition("?")[0] not in PROBES:
            self._refuse_connection()
        elif len(hosts) > 1 or not (hosts or version == "1.0"):
            message = f"a request has one Host header (RFC 9112, section 3.2); this one has {len(hosts)}"
            self.refuse(ApiError(400, message, code="invalid_host"))
        elif set(codings := self._transfer_codings()) - {b"chunked"}:
            message = (
                f"Transfer-Encoding: {b', '.join(codings).decode('latin-1')}: this server knows chunked alone"
            )
            self.refuse(ApiError(501, message, code="not_supported"))
        elif len(codings) > 1:
            message = "Transfer-Encoding: chunked once (RFC 9112, section 6.1)"
            self.refuse(ApiError(400, message, code="invalid_http"))
        elif hosts and not HOST.fullmatch(hosts[0]):
            message = f"Host: {hosts[0].decode('latin-1')!r} is neither a name nor an address"
            self.refuse(ApiError(400, message, code="invalid_host"))
        else:
            return
        raise ValueError

    def _transfer_codings(self) -> list[bytes]:
        given = b",".join(value for name, value in self.headers if name == b"transfer-encoding")
        return [coding.strip().lower() for coding in given.split(b",") if coding.strip()]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = "head"

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase == "body":
            return  # a trailer; the head was checked before
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head(f"a request may have {MAX_HEADERS} headers")
            raise ValueError  # stops the parser

    def on_headers_complete(self) -> None:
        self._check_head()
        if self.parser.should_upgrade():
            return  # the head is read again, without the offer
        self._phase = "body"
        old = self.parser.get_http_version() == "1.0"
        if old:
            self.expect_100_continue = False  # HTTP/1.0 has no interim answers (RFC 9110, section 10.1.1)
        super().on_headers_complete()
        if old:
            end_by_closing(self.cycle)
        if not self.pipeline:
            self._active = self.cycle
            self._rank()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._phase = "idle"
        self._received = self._body = 0
        super().on_message_complete()
        self._rank()

    def on_response_complete(self) -> None:
        if self.pipeline and not self.transport.is_closing():
            self._active = self.pipeline[-1][0]  # it is answered now
        super().on_response_complete()
        if not self.transport.is_closing():
            self._rank()
        if self._refusal is not None and not self.busy and not self.transport.is_closing():
            self._answer_refusal(self._refusal)
        elif self._later and not self.pipeline:
            data, self._later = bytes(self._later), bytearray()
            self.data_received(data)

    # --- time ----------------------------------------------------------------------------------------------

    def _time(self) -> None:
        """Starts the timer of the current phase, from the phase's beginning on."""
        if self._phase == self._timed or self._refused or self.transport.is_closing():
            return
        self._stop_timer()
        self._timed = self._phase
        if self._phase != "idle":
            settings = self.config.settings
            seconds = settings.header_timeout if self._phase == "head" else settings.body_timeout
            self._timer = self.loop.call_later(seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self._received and (self._phase == "head" or self.busy):
            self.refuse(ApiError(408, f"the request's {self._phase} took too long to come", code="timeout"))
        else:
            self.transport.close()

    # --- refusals ------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Refuses input that is not HTTP."""
        self.refuse(ApiError(400, msg, code="invalid_http"))

    def refuse(self, error: ApiError) -> None:
        """Answers with `error` and closes the connection, after the complete requests before it are answered.

        If the answer of a request began before its body was complete, there is no second answer.
        """
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_timer()
        if self.pipeline and self._phase == "body":
            self.pipeline.popleft()  # the newest, whose body is refused
        if self.busy and not self.unread:
            self._refusal = error
            self.flow.resume_reading()  # otherwise a disconnect goes unnoticed
            return
        if self.unread:
            if self.cycle.response_started:
                self.transport.close()
                return
            self.cycle.disconnected = True  # its app waits for the rest of the body
            self.cycle.message_event.set()
        elif self._phase == "body":  # the request was answered before its end
            self._hang_up()
            return
        self._answer_refusal(error)

    def _answer_refusal(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        self.transport.write(
            STATUS_LINE[error.status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        self._hang_up()

    def _hang_up(self) -> None:
        if self.transport.can_write_eof():
            self.flow.resume_reading()
            self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()
