"""Clients that send too much, send too slowly, or disconnect."""

import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from qwen_serve.server.api.connection import BoundedProtocol
from tests.server.api.conftest import Server, Start
from tests.waiting import wait_until

ENDLESS = list(range(97, 107)) * 10_000
FOR_EVER = f'{{"prompt": "a", "max_tokens": {len(ENDLESS)}}}'
GET = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(body: str, **headers: str) -> bytes:
    lines = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **headers,
    }
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n{body}".encode()


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80), timeout=20) as client:
        yield client


def everything(client: socket.socket) -> bytes:
    """Everything that arrives until the server closes the connection."""
    received = b""
    while piece := client.recv(65536):
        received += piece
    return received


def send_as_far_as_possible(client: socket.socket, pieces: list[bytes]) -> None:
    with suppress(OSError):
        for piece in pieces:
            client.sendall(piece)


@pytest.mark.parametrize(
    "pieces",
    [
        [GET[:-2], *[b"a: \r\n" * 10_000] * 1000],
        [GET[:-2], b"a: ", *[b"x" * 65536] * 1000],
        [b"GET /", *[b"x" * 65536] * 1000],
        [b"\r\n" * 32768] * 1000,
        [
            post("", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b""),
            b"1\r\n{\r\n0\r\na: ",
            *[b"x" * 65536] * 1000,
        ],
        [
            post("", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b""),
            *[b"1\r\n \r\n" * 1000] * 1000,
        ],
    ],
    ids=["many headers", "a long value", "a long path", "blank lines", "a trailer", "small chunks"],
)
def test_what_surrounds_a_body_has_a_limit(start_shared: Start, pieces: list[bytes]) -> None:
    server = start_shared("x", api_key="secret")
    with connected(server) as client:
        send_as_far_as_possible(client, pieces)
        answer = everything(client)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 401 "))
    assert httpx.get(f"{server.url}/ping").status_code == 200


def test_headers_within_the_limit(start_shared: Start) -> None:
    server = start_shared("x")
    headers = {f"x-{i}": "y" * 300 for i in range(200)}
    assert httpx.get(f"{server.url}/ping", headers=headers).status_code == 200
    refused = httpx.get(f"{server.url}/ping", headers={f"x-{i}": "y" for i in range(300)})
    assert refused.status_code == 431
    assert refused.json()["error"]["code"] == "headers_too_large"


def test_what_is_no_http(start_shared: Start) -> None:
    with connected(start_shared("x")) as client:
        client.sendall(b"hello\r\n\r\n")
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code": "invalid_http"' in answer


def test_a_moment_without_memory_is_not_the_clients_fault(
    start_shared: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: BoundedProtocol, body: bytes) -> None:
        raise MemoryError

    server = start_shared("x")
    with monkeypatch.context() as patch:
        patch.setattr(BoundedProtocol, "on_body", no_memory)
        with connected(server) as client:
            client.sendall(post('{"prompt": "a"}'))
            assert everything(client).startswith(b"HTTP/1.1 500 ")
    assert server.post("/v1/completions", prompt="a").status_code == 200


@pytest.mark.parametrize(("stream", "at_once"), [("true", False), ("false", True)])
@pytest.mark.parametrize(
    "pipelined",
    [
        *(b"", GET, GET * 3, GET[:20], post('{"prompt": "b"}'), GET * 1000),
        post("no chunk", Transfer_Encoding="chunked").replace(b"Content-Length: 8\r\n", b""),
    ],
)
def test_a_client_that_leaves_behind_a_pipelined_request(
    start_shared: Start, stream: str, pipelined: bytes, at_once: bool
) -> None:
    server = start_shared(lambda _: ENDLESS, delay=0.002)
    body = f'{{"prompt": "a", "stream": {stream}, "max_tokens": {len(ENDLESS)}}}'
    before = len(server.engine.submissions)
    with connected(server) as client:
        client.sendall(post(body) + pipelined if at_once else post(body))
        wait_until(lambda: len(server.engine.running) == 1)
        if not at_once:
            client.sendall(pipelined)
            time.sleep(0.05)  # read, perhaps, before the client leaves
    wait_until(lambda: not server.engine.running and server.service.in_flight == 0)
    left = server.engine.submissions[before]
    assert left.sent < left.limit, "it was answered to its end"
    wait_until(lambda: not server.service.open)


def test_what_is_pipelined_has_a_limit(start_shared: Start) -> None:
    server = start_shared(lambda _: ENDLESS, delay=0.002)
    with connected(server) as client:
        client.sendall(post(FOR_EVER))
        wait_until(lambda: len(server.engine.running) == 1)
        send_as_far_as_possible(client, [GET * 500] * 100)
        with suppress(ConnectionError):
            assert not client.recv(1), "it was closed, not answered"
    wait_until(lambda: not server.engine.running)
    assert server.http.get("/ping").status_code == 200


def test_pipelined_requests_are_answered_in_order(start_shared: Start) -> None:
    server = start_shared(lambda prompt: prompt * 3, delay=0.001)
    with connected(server) as client:
        requests = [post(f'{{"prompt": "<{i}>", "stream": {str(i % 2 == 0).lower()}}}') for i in range(20)]
        client.sendall(b"".join(requests[:7]))
        for request in requests[7:]:
            for start in range(0, len(request), 40):
                client.sendall(request[start : start + 40])
                time.sleep(0.0005)  # in pieces, as a slow line would bring them
        client.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        answer = everything(client).decode()
    assert answer.count("HTTP/1.1 200 OK") == 21
    at = [answer.index(f'"text":"{f"<{i}>" * 3}"') for i in range(1, 20, 2)]
    assert at == sorted(at)
    assert answer.rstrip().endswith("}")


@pytest.mark.parametrize(
    ("stream", "before"),
    [("true", b""), ("false", post('{"prompt": "b"}'))],
    ids=["one before", "two before"],
)
@pytest.mark.parametrize(
    ("malformed", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (GET.replace(b"Host: localhost\r\n", b""), b"400"),
        (GET[:-2] + b"a: \r\n" * 300 + b"\r\n", b"431"),
        (post("", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"") + b"z\r\n", b"400"),
    ],
    ids=["no HTTP", "no host", "many headers", "a broken chunk"],
)
def test_what_is_refused_behind_a_request_leaves_it_its_answer(
    start_shared: Start, malformed: bytes, status: bytes, before: bytes, stream: str
) -> None:
    """Complete requests are answered first and in full."""
    server = start_shared(lambda prompt: prompt * 10, delay=0.01)
    server.engine.held = True
    with connected(server) as client:
        client.sendall(post(f'{{"prompt": "a", "stream": {stream}}}') + before)
        wait_until(lambda: len(server.engine.running) == 1)
        client.sendall(malformed)
        server.engine.held = False
        answer = everything(client)
    statuses = re.findall(rb"HTTP/1.1 (\d+)", answer)
    assert statuses == [b"200"] * (1 + bool(before)) + [status]
    if stream == "true":
        assert b"data: [DONE]" in answer
    else:
        assert b'"text":"' + b"a" * 10 + b'"' in answer


@pytest.mark.parametrize("version", [b"2.0", b"0.9"])
def test_other_versions_of_http(start_shared: Start, version: bytes) -> None:
    server = start_shared("x")
    with connected(server) as client:
        client.sendall(GET.replace(b"HTTP/1.1", b"HTTP/" + version))
        assert everything(client).startswith(b"HTTP/1.1 505 ")


def test_headers_that_do_not_come(start: Start) -> None:
    server = start("x", header_timeout=0.5)
    with connected(server) as silent, connected(server) as slow:
        slow.sendall(GET[:-2])
        while not select.select([slow], [], [], 0.2)[0]:
            slow.sendall(b"a: b\r\n")  # progress is no excuse
        assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
        assert everything(silent) == b""


def test_a_body_that_does_not_come(start: Start) -> None:
    server = start("x", body_timeout=0.5)
    with connected(server) as client:
        client.sendall(post('{"prompt": "x"}')[:-3])
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "timeout"' in answer
    wait_until(lambda: server.service.in_flight == 0)
    assert server.service.bodies.held == 0


def test_an_answer_may_take_longer_than_a_request(start: Start) -> None:
    server = start("x" * 220, delay=0.005, header_timeout=0.8, body_timeout=0.8)
    assert server.post("/v1/completions", prompt="x", max_tokens=220).status_code == 200
    time.sleep(1)  # idle, but kept alive
    assert server.post("/v1/completions", prompt="x").status_code == 200


def test_connections_have_a_limit(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(lambda _: ENDLESS, delay=0.01, max_connections=8)
    server.http.close()
    with ExitStack() as stack:
        for _ in range(40):  # half open: each new one takes the place of the oldest
            stack.enter_context(connected(server)).sendall(b"GET / HT")
        assert httpx.get(f"{server.url}/ping").status_code == 200
        assert "an idle one is closed" in caplog.text
        for _ in range(8):
            stack.enter_context(connected(server)).sendall(post(FOR_EVER))
        wait_until(lambda: len(server.engine.running) == 8)
        with connected(server) as late:
            late.sendall(post('{"prompt": "x"}'))
            answer = everything(late)
        assert answer.startswith(b"HTTP/1.1 503 ")
        with ExitStack() as probes:
            for _ in range(40):  # silent ones do not fill what is kept for health checks
                probes.enter_context(connected(server))
            assert httpx.get(f"{server.url}/ping").status_code == 200
        assert "one more gets 503" in caplog.text
    wait_until(lambda: server.service.in_flight == 0)
    assert httpx.get(f"{server.url}/ping").status_code == 200


def test_half_sent_bodies_make_room(start: Start) -> None:
    server = start(lambda prompt: prompt, max_connections=8)
    server.http.close()
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(connected(server)).sendall(post('{"prompt": "x"}')[:-3])
        assert httpx.get(f"{server.url}/ping").status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200
    wait_until(lambda: server.service.in_flight == 0)
    assert server.service.bodies.held == 0


def test_a_new_connection_does_not_look_at_all_the_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise thousands of new connections would block the event loop for seconds."""
    looks = 0

    def busy(self: BoundedProtocol) -> bool:
        nonlocal looks
        looks += 1
        return self._active is not None and not self._active.response_complete

    monkeypatch.setattr(BoundedProtocol, "busy", property(busy))
    server = start("x", max_connections=200)
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connected(server))
        assert httpx.get(f"{server.url}/ping").status_code == 200
        looks = 0
        for _ in range(50):
            stack.enter_context(connected(server))
        assert httpx.get(f"{server.url}/ping").status_code == 200
        assert looks < 50 * 10


def test_a_client_of_http_1_0_gets_no_interim_answer(start: Start) -> None:
    """The client would take it for the answer (RFC 9110, section 10.1.1)."""
    server = start("Hello!")
    request = post('{"prompt": "x"}', Expect="100-continue")
    for version, status in ((b"1.1", b"100 Continue"), (b"1.0", b"200 OK")):
        with connected(server) as client:
            client.sendall(request.replace(b"HTTP/1.1", b"HTTP/" + version))
            assert client.recv(65536).startswith(b"HTTP/1.1 " + status)


def test_a_stream_for_http_1_0_has_no_chunks(start: Start) -> None:
    """The client would take their lengths for text (RFC 9112, section 6.1). The connection's end ends it."""
    server = start("Hello!")
    for body in ('{"prompt": "x", "stream": true}', '{"prompt": "x"}'):
        with connected(server) as client:
            client.sendall(post(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
            head, _, answer = everything(client).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert re.findall(rb"connection: (\S+)", head) == [b"close"]
        assert answer.startswith((b"data: {", b"{"))
        assert answer.endswith((b"data: [DONE]\n\n", b"}"))


UPGRADE = {"Connection": "Upgrade, HTTP2-Settings", "HTTP2_Settings": "AAMAAABkAAQ"}


def chunked(request: bytes, *sizes: int) -> bytes:
    """The same request with its body in chunks of these sizes, and the rest in one more chunk."""
    head, _, body = request.partition(b"\r\n\r\n")
    head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
    chunks = []
    for size in (*sizes, len(body) - sum(sizes)):
        chunks.append(b"%x\r\n%s\r\n" % (size, body[:size]))
        body = body[size:]
    return head + b"\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("protocol", "encode"),
    [
        ("h2c", lambda request: request),
        ("websocket", lambda request: chunked(request, 1, 4)),
        ("TLS/1.2, h2c", lambda request: request),
    ],
)
@pytest.mark.parametrize("cut", ["whole", "behind the head", "in the head", "byte by byte"])
def test_an_offer_to_upgrade_is_passed_over(
    start_shared: Start, protocol: str, encode: Callable[[bytes], bytes], cut: str
) -> None:
    """Java's HTTP client makes one with every first request; its body is read, and so is what follows."""
    server = start_shared(lambda prompt: prompt)
    request = encode(post('{"prompt": "<1>"}', **UPGRADE, Upgrade=protocol))
    behind = encode(post('{"prompt": "<2>"}')) + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    at = request.index(b"\r\n\r\n") + 4
    with connected(server) as client:
        if cut == "whole":
            client.sendall(request + behind)
        elif cut == "byte by byte":
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in request + behind:
                client.sendall(bytes([byte]))
        else:
            parts = (request[:at], request[at:]) if cut == "behind the head" else (request[:40], request[40:])
            client.sendall(parts[0])
            time.sleep(0.05)  # in two pieces
            client.sendall(parts[1])
            assert b'"text":"<1>"' in client.recv(65536)
            client.sendall(behind)
        answer = everything(client)
    assert answer.count(b"HTTP/1.1 200 OK") == (3 if cut in ("whole", "byte by byte") else 2)
    assert b'"text":"<2>"' in answer


def test_a_body_behind_an_offer_to_upgrade_is_no_request(start_shared: Start) -> None:
    server = start_shared(lambda prompt: prompt)
    hidden = GET.replace(b"/ping", b"/v1/models").decode()
    request = post(hidden, **UPGRADE, Upgrade="h2c")
    with connected(server) as client:
        at = request.index(b"\r\n\r\n") + 4
        client.sendall(request[:at])
        time.sleep(0.05)  # in two pieces
        client.sendall(request[at:] + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        answer = everything(client)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"400", b"200"], "not JSON; and /ping"


def test_an_offer_to_upgrade_does_not_lift_bounds(start_shared: Start) -> None:
    server = start_shared("x")
    head = post("", **UPGRADE, Upgrade="h2c").replace(b"Content-Length: 0\r\n", b"")
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    many = b"".join(b"a%d: b\r\n" % i for i in range(300))
    for more, status in ((both, b"400"), (many, b"431"), (b"a: " + b"x" * 70_000, b"431")):
        with connected(server) as client:
            client.sendall(head[:-2] + more)
            assert everything(client).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    ("hosts", "version", "status"),
    [
        ([], "1.1", "400"),
        (["localhost", "localhost"], "1.1", "400"),
        (["localhost", "evil.example"], "1.0", "400"),
        (["localhost, evil.example"], "1.1", "400"),
        (["localhost/x"], "1.1", "400"),
        (["user@localhost"], "1.1", "400"),
        (["localhost"], "1.1", "200"),
        (["[::1]:80"], "1.1", "200"),
        ([""], "1.1", "200"),
        ([], "1.0", "200"),
    ],
)
def test_one_host(start_shared: Start, hosts: list[str], version: str, status: str) -> None:
    """RFC 9112, section 3.2: a proxy may use another Host header than this server."""
    head = "".join(f"Host: {host}\r\n" for host in hosts)
    with connected(start_shared("x")) as client:
        client.sendall(f"GET /ping HTTP/{version}\r\n{head}Connection: close\r\n\r\n".encode())
        answer = everything(client).decode()
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert ("invalid_host" in answer) == (status == "400")


def test_a_server_is_no_proxy(start_shared: Start) -> None:
    with connected(start_shared("x")) as client:
        client.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n" + GET)
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 501 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_trailer_is_no_header(start_shared: Start) -> None:
    server = start_shared("x", api_key="secret")
    request = chunked(post('{"prompt": "x"}', Connection="close"))
    with connected(server) as client:
        client.sendall(request[:-2] + b"Authorization: Bearer secret\r\n\r\n")
        assert everything(client).startswith(b"HTTP/1.1 401 ")
