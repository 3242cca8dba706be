"""Requests that come from web pages."""

import httpx
import pytest
from starlette.responses import PlainTextResponse

from qwen_serve.server.api.origin import KnownSites, host_name, is_local
from tests.server.api.conftest import Server, Start
from tests.server.api.test_bad_input import error_of


def ask(server: Server, **headers: str) -> int:
    """A request that a page can send without a preflight: it has no content type."""
    sent = {
        name: value.replace("SERVER", server.http.base_url.netloc.decode()) for name, value in headers.items()
    }
    response = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=sent)
    if response.status_code != 200:
        error_of(response, response.status_code)
    return response.status_code


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://SERVER"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:1"}, 403),
        ({"origin": "http://["}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8080", "origin": "http://evil.example:8080"}, 403),
        ({"host": "localhost"}, 200),
        ({"host": "app.localhost:99"}, 200),
        ({"host": "192.168.0.7:8080"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"host": "["}, 403),
        ({"host": "localhost.evil.example"}, 403),
    ],
)
def test_a_page_cannot_drive_a_local_server(
    start_shared: Start, headers: dict[str, str], status: int
) -> None:
    assert ask(start_shared("x"), **headers) == status


def test_a_key_is_enough(start_shared: Start) -> None:
    server = start_shared("x", api_key="secret")
    assert ask(server, origin="https://page.example", host="my.example", authorization="Bearer secret") == 200
    assert ask(server, origin="https://page.example") == 401


def test_known_hosts(start_shared: Start) -> None:
    server = start_shared("x", allowed_hosts="my.example, Other.example")
    assert ask(server, host="other.example:80") == 200
    assert ask(server, host="evil.example") == 403
    assert ask(start_shared("x", allowed_hosts="*"), host="evil.example") == 200


def test_probes_answer_anybody(start_shared: Start) -> None:
    headers = {"host": "evil.example", "origin": "https://evil.example"}
    server = start_shared("x")
    assert [
        server.http.get(path, headers=headers).status_code for path in ("/ping", "/health", "/metrics")
    ] == [200] * 3


async def test_a_server_for_others_has_any_name() -> None:
    sites = KnownSites(PlainTextResponse("ok"), "0.0.0.0", (), ("https://page.example",), ())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(sites), base_url="http://anything") as http:
        assert (await http.get("/")).text == "ok"
        assert (await http.get("/", headers={"origin": "https://page.example"})).text == "ok"
        assert (await http.get("/", headers={"origin": "https://evil.example"})).status_code == 403


def test_names() -> None:
    assert host_name("LOCALHOST:80") == "localhost"
    assert is_local("127.9.9.9")
    assert not is_local("0.0.0.0")
