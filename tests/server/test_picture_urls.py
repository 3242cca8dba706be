"""Fetching of pictures: allowed hosts, limits of size and time, and addresses that are refused."""

import asyncio
import base64
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector, web
from pydantic import ValidationError

from qwen_serve.server.api import picture_urls
from qwen_serve.server.api.picture_urls import is_public
from qwen_serve.server.chat import PromptError
from qwen_serve.server.chat.pictures import GivenPicture
from qwen_serve.server.settings import Settings
from tests.in_thread import ServedInThread
from tests.server.seeing import ask, body, encoded, needs_vision, noise, post, text
from tests.server.serving import Served, certificate, serving

PICTURE = base64.b64decode(encoded(noise(1)))


NAMES = {
    "localhost": ["10.0.0.1"],
    "pictures.example.com": ["127.0.0.1"],
    "mixed.example.com": ["127.0.0.1", "10.0.0.1"],
}
"""What names resolve to; 127.0.0.1 passes for a public address."""


async def resolved(name: str, *_: int) -> list[tuple[int, int, str]]:
    return [_place(address) for address in NAMES[name]]


def _place(address: str) -> tuple[int, int, str]:
    return socket.AF_INET, socket.IPPROTO_TCP, address


class Pictures(ServedInThread):
    """A web server with pictures, and with traps."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__()
        self.ssl_context = context
        self.asked: list[str] = []

    def make_app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{what:.*}", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        what = request.match_info["what"]
        self.asked.append(what)
        if what == "circle":
            raise web.HTTPFound("/circle")
        if what.startswith("to/"):
            raise web.HTTPFound(request.query["next"])
        if what == "slow":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(PICTURE[:1])
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.1)  # and no more, until the server has given up
        if what == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(bytes(2**20))
            return response
        if what == "none":
            raise web.HTTPNotFound
        return web.Response(body=b"hello" if what == "text" else PICTURE, content_type="image/png")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pictures]:
    pem, key = certificate(tmp_path_factory.mktemp("certificate"), "DNS:pictures.example.com")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem, key)
    patch = pytest.MonkeyPatch()
    patch.setattr(picture_urls, "trust", lambda: ssl.create_default_context(cafile=str(pem)))
    patch.setattr(picture_urls, "is_public", lambda address: address == "127.0.0.1" or is_public(address))
    patch.setattr(picture_urls, "lookup", resolved)
    with Pictures(context) as pictures:
        yield pictures
    patch.undo()


@pytest.fixture(scope="module")
def fetching(nano_f32: Path, mmproj: Path, host: Pictures) -> Iterator[Served]:
    hosts = "127.0.0.1, 10.0.0.1, LocalHost, *.example.com"
    with serving(nano_f32, mmproj=mmproj, image_urls="https", image_url_hosts=hosts, ctx_size=2048) as served:
        yield served


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@needs_vision
async def test_a_picture_elsewhere_is_that_picture(fetching: Served, host: Pictures) -> None:
    direct = shown(f"data:image/png;base64,{encoded(noise(1))}")
    one = await ask(fetching, body(direct, text("What is it?"), direct))
    other = await ask(fetching, body(shown(f"{host.url}/a.png"), text("What is it?"), shown(f"{host.url}/b")))
    assert other["choices"][0]["message"] == one["choices"][0]["message"]
    assert other["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    source = {"type": "url", "url": f"{host.url}/c"}
    block = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    told = await post(fetching, "/v1/messages/count_tokens", block)
    assert told == {"input_tokens": (await post(fetching, "/tokenize", body(direct)))["count"]}
    redirected = shown(f"{host.url}/to/x?next=/to/y?next=/d.png")
    assert (await ask(fetching, body(redirected)))["usage"]["prompt_tokens"] == told["input_tokens"]
    assert not fetching.service.bodies.held


REFUSED = {
    "without TLS": ("http://127.0.0.1/a", "leads to http://; only https:// is fetched"),
    "a file": ("file:///etc/passwd", "leads to file://"),
    "another host": ("https://example.org/a", "is of the host example.org, which is not one of"),
    "the host of none": ("https://example.com/a", "is of the host example.com, which is not one of"),
    "a private address": ("https://10.0.0.1/a", "10.0.0.1 is not a public address"),
    "a name of one": ("https://localhost/a", "localhost is not a public address"),
    "one of two addresses": ("https://mixed.example.com/a", "mixed.example.com is not a public address"),
    "a redirect without TLS": ("{url}/to/x?next=http://127.0.0.1/a", "leads to http://"),
    "a redirect elsewhere": ("{url}/to/x?next=https://example.org/a", "is of the host example.org"),
    "a redirect inside": ("{url}/to/x?next=https://10.0.0.1/a", "10.0.0.1 is not a public address"),
    "a redirect to a name": ("{url}/to/x?next=https://localhost/a", "localhost is not a public address"),
    "in circles": ("{url}/circle", "is redirected more than 3 times"),
    "nothing there": ("{url}/none", "127.0.0.1 answered 404"),
    "a text": ("{url}/text", "is no picture of a known format"),
    "too large": ("{url}/endless", "is larger than 32 MiB"),
    "one that never ends": ("{url}/slow", "could not be fetched within 1 s"),
    "nobody": ("https://127.0.0.1:1/a", "could not be fetched: ClientConnectorError"),
    "no address": ("https://[/", "could not be fetched"),
}


@needs_vision
@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_refused_is_named(
    case: str, fetching: Served, host: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "one that never ends":
        monkeypatch.setattr(picture_urls, "SECONDS", 1.0)
    url, message = REFUSED[case]
    direct = shown(f"data:image/png;base64,{encoded(noise(2))}")
    error = (await ask(fetching, body(direct, shown(url.replace("{url}", host.url))), 400))["error"]
    assert message in error["message"]
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert not fetching.service.bodies.held


@needs_vision
async def test_a_name_is_resolved_once_and_that_address_is_asked(
    fetching: Served, host: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second look-up would return a private address."""
    resolved: list[str] = []

    async def once(name: str, *_: int) -> list[tuple[int, int, str]]:
        resolved.append(name)
        return [_place("127.0.0.1" if len(resolved) == 1 else "10.0.0.1")]

    monkeypatch.setattr(picture_urls, "lookup", once)
    port = host.url.rpartition(":")[2]
    await ask(fetching, body(shown(f"https://pictures.example.com:{port}/once")))
    assert resolved == ["pictures.example.com"]
    assert host.asked[-1] == "once"


@needs_vision
async def test_what_is_fetched_counts_as_the_body(
    fetching: Served, host: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.service.bodies, "_limit", 2000)
    error = (await ask(fetching, body(shown(f"{host.url}/endless")), 429))["error"]
    assert error["code"] == "bodies_full"
    assert not fetching.service.bodies.held


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.1.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff0e::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::10.0.0.1", False),
        ("64:ff9b::93.184.215.14", True),
        ("64:ff9b:1::10.0.0.1", False),
        ("::10.0.0.1", False),
        ("::ffff:0:10.0.0.1", False),
        ("fec0::1", False),
        ("192.0.0.192", False),
        ("2002:7f00:1::", False),
        ("2001:0:0:1::1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize("fields", [{"image_urls": "https"}, {"image_url_hosts": "*"}])
def test_hosts_are_named(fields: dict[str, Any], nano_f32: Path) -> None:
    with pytest.raises(ValidationError, match="image_urls 'https' and image_url_hosts go together"):
        Settings(model=nano_f32, **fields)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "2130706433", "127.0.0.1.", "127.1.", "[::1]", "[::ffff:7f00:1]", "１２７.１"],
)
async def test_no_spelling_of_an_address_passes_for_a_name(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp connects to what looks like an address without asking a resolver."""
    monkeypatch.setattr(picture_urls, "is_public", is_public)
    picture = GivenPicture(f"https://{host}:1/a", "image_url")
    async with ClientSession(connector=TCPConnector(resolver=picture_urls.public_resolver())) as session:
        with pytest.raises(PromptError, match=r"is not a public address|could not be fetched: InvalidUrl"):
            await picture_urls.fetched(session, picture, ["*"], lambda _: None)
