"""`/mcp-proxy` calls MCP servers of allowed origins, and nothing else."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from fastapi import FastAPI

from qwen_serve.server.api import mcp_proxy
from qwen_serve.server.api.errors import ApiError
from qwen_serve.server.api.mcp_proxy import MAX_ANSWER, MAX_BODY, PATH, origin_of
from tests.http_server import JsonHandler, serving
from tests.server.api.conftest import Server, Start
from tests.waiting import wait_until


class Other(JsonHandler, BaseHTTPRequestHandler):
    """A server that tells what it was asked, or does what its path says."""

    asked: list[tuple[str, str, dict[str, str], bytes]]
    quiet: threading.Event

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append((self.command, self.path, dict(self.headers), body))
        match self.path.partition("?")[0]:
            case "/redirect":
                self.answer(302, b"", Location="http://127.0.0.1:1/secret")
            case "/large":
                self.answer(200, b"x" * (MAX_ANSWER + 1))
            case "/html":
                self.answer(200, b"<script>alert(1)</script>", **{"Content-Type": "text/html"})
            case "/packed":
                self.answer(200, b"\x1f\x8b", **{"Content-Encoding": "gzip"})
            case "/gone":
                self.answer(404, b"no such session")
            case "/silent":
                self.quiet.wait(60)
                self.answer(200, b"{}")
            case _:
                self.answer(200, b'{"fine": true}', **{"Mcp-Session-Id": "s1", "Set-Cookie": "a=b"})

    def do_DELETE(self) -> None:
        self.do_POST()


@pytest.fixture
def other() -> Iterator[ThreadingHTTPServer]:
    Other.asked = []
    Other.quiet = threading.Event()
    with serving(Other) as server:
        yield server
        Other.quiet.set()


def address(other: ThreadingHTTPServer, path: str = "/mcp") -> str:
    return f"http://127.0.0.1:{other.server_port}{path}"


def post(server: Server, url: str | None, **headers: str) -> httpx.Response:
    given = {"Content-Type": "application/json", **headers, **({} if url is None else {"Mcp-Url": url})}
    return server.http.post(PATH, content=b'{"jsonrpc": "2.0"}', headers=given)


def test_it_passes_on_what_mcp_needs_and_no_more(start: Start, other: ThreadingHTTPServer) -> None:
    server = start("x", mcp_origins=address(other, ""), api_key="ours")
    server.http.headers["Authorization"] = "Bearer ours"
    answer = post(
        server, address(other, "/mcp?a=1"), **{"Mcp-Authorization": "Bearer theirs", "Mcp-Session-Id": "s0"}
    )
    assert (answer.status_code, answer.json()) == (200, {"fine": True})
    assert answer.headers["Mcp-Session-Id"] == "s1"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "Set-Cookie" not in answer.headers
    ((method, path, headers, body),) = Other.asked
    assert (method, path, body) == ("POST", "/mcp?a=1", b'{"jsonrpc": "2.0"}')
    assert headers["Authorization"] == "Bearer theirs"
    assert headers["Mcp-Session-Id"] == "s0"
    assert not {"X-Api-Key", "Origin", "Cookie", "Mcp-Url", "User-Agent"} & set(headers)
    del server.http.headers["Authorization"]
    assert post(server, address(other)).status_code == 401


def test_it_is_off_by_default(start: Start, other: ThreadingHTTPServer) -> None:
    answer = post(start("x"), address(other))
    assert answer.status_code == 403
    assert "--mcp-origins" in answer.json()["error"]["message"]
    assert not Other.asked


@pytest.mark.parametrize(
    "form",
    [
        "http://127.0.0.1:1/mcp",
        "http://localhost:{port}/mcp",
        "https://127.0.0.1:{port}/mcp",
        "http://127.0.0.1:{port}@example.com/",
        "http://user@127.0.0.1:{port}/",
        "http://127.0.0.1:{port}\\@example.com/",
        "http://127.0.0.1.:{port}/",
        "http://2130706433:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "//127.0.0.1:{port}/",
        "file:///etc/passwd",
        "http://",
        "http://127.0.0.1:{port}/ a",
        "http://127.0.0.1:99999999/",
        "gopher://127.0.0.1:{port}/",
    ],
)
def test_other_addresses_are_refused(start: Start, other: ThreadingHTTPServer, form: str) -> None:
    server = start("x", mcp_origins=address(other, ""))
    assert post(server, form.format(port=other.server_port)).status_code in (400, 403)
    assert not Other.asked


def test_an_address_must_be_named(start: Start, other: ThreadingHTTPServer) -> None:
    server = start("x", mcp_origins=address(other, ""))
    assert post(server, None).status_code == 400
    assert server.http.get(PATH).status_code == 405
    asked_elsewhere = {"Mcp-Url": address(other), "Origin": "http://evil.example"}
    assert server.http.post(PATH, headers=asked_elsewhere).status_code == 403
    assert not Other.asked


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/redirect", 502, "redirects"),
        ("/large", 502, "more than"),
        ("/html", 502, "text/html, not JSON"),
        ("/packed", 502, "compressed"),
        ("/gone", 404, "answered 404 Not Found: no such session"),
    ],
)
def test_answers_that_are_not_passed_on(
    start: Start, other: ThreadingHTTPServer, path: str, status: int, said: str
) -> None:
    answer = post(start("x", mcp_origins=address(other, "")), address(other, path))
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]
    assert len(Other.asked) == 1


def test_size_and_time_are_bounded(
    start: Start, other: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("x", mcp_origins=address(other, ""))
    large = server.http.post(PATH, content=b"x" * (MAX_BODY + 1), headers={"Mcp-Url": address(other)})
    assert large.status_code == 413
    assert not Other.asked
    monkeypatch.setattr(mcp_proxy, "TOTAL_S", 0.2)
    late = post(server, address(other, "/silent"))
    assert (late.status_code, late.json()["error"]["code"]) == (504, "mcp_timeout")
    nobody = post(start("x", mcp_origins="http://127.0.0.1:9"), "http://127.0.0.1:9/mcp")
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (502, "mcp_unreachable")


def test_number_is_bounded(start: Start, other: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_proxy, "AT_ONCE", 2)
    server = start("x", mcp_origins=address(other, ""))
    with ThreadPoolExecutor(2) as clients:
        running = [clients.submit(post, server, address(other, "/silent")) for _ in range(2)]
        try:
            wait_until(lambda: len(Other.asked) == 2)
            refused = post(server, address(other))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
            assert len(Other.asked) == 2
        finally:
            Other.quiet.set()
        assert [one.result().status_code for one in running] == [200, 200]
    assert post(server, address(other)).status_code == 200


@pytest.mark.parametrize("leaves", [False, True])
def test_a_call_has_its_slot_from_the_check_to_its_end(
    other: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(mcp_proxy, "AT_ONCE", 1)
    app = FastAPI()
    mcp_proxy.install(app, [address(other, "")])

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            first, second = (
                asyncio.ensure_future(client.post(PATH, headers={"Mcp-Url": address(other, "/silent")}))
                for _ in range(2)
            )
            if leaves:
                second.cancel()
                await asyncio.to_thread(wait_until, lambda: Other.asked)
                first.cancel()
                await asyncio.wait([first])
                second = asyncio.ensure_future(client.post(PATH, headers={"Mcp-Url": address(other)}))
            await asyncio.wait([second], timeout=60)
            Other.quiet.set()
            with pytest.raises(ApiError, match="run already"):
                await second

    asyncio.run(ask())
    wait_until(lambda: not any(one.name == "mcp-proxy" for one in threading.enumerate()))


def test_origins_are_compared_as_they_are_called() -> None:
    assert (
        origin_of("HTTP://Example.com/x") == origin_of("http://example.com:80") == ("http", "example.com", 80)
    )
    assert origin_of("https://example.com") == ("https", "example.com", 443)
