"""Fetches pictures by URL from the configured hosts, at public addresses only.

Each name is resolved once. The address is checked and then used for the connection, so that a second lookup
cannot return another address. Every redirect is checked in the same way.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from typing import TYPE_CHECKING, Any

from qwen_serve.server.chat import PromptError
from qwen_serve.server.chat.pictures import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import ClientSession
    from yarl import URL

    from qwen_serve.server.api.context import RequestContext
    from qwen_serve.server.chat.pictures import GivenPicture

SECONDS = 10.0
"""Time limit for one picture, redirects included."""

REDIRECTS = 3
PIECE = 2**16
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "qwen-serve"}

_NAT64 = IPv6Network("64:ff9b::/96")
_UNICAST = IPv6Network("2000::/3")
"""All public IPv6 addresses (IANA). The ipaddress module has a list of those that are not public. In older
versions of Python it lacks site-local addresses, local NAT64, and IPv4-compatible and translated ones."""
_PROTOCOLS = IPv4Network("192.0.0.0/24")
"""IETF protocol assignments. A cloud's metadata service is at 192.0.0.192, which older versions of Python
call global."""


class NotPublic(Exception):
    """A name resolves to an address that may not be contacted."""


def is_public(address: str) -> bool:
    """Whether an IP address is public and embeds no other address."""
    ip = ip_address(address.partition("%")[0])
    if ip in _NAT64:
        return is_public(str(IPv4Address(int(ip) & 0xFFFFFFFF)))
    if ip.version == 6 and ip not in _UNICAST:
        return False
    wrapped: list[Any] = [ip.sixtofour, *(ip.teredo or ())] if ip.version == 6 else []
    return all(
        one.is_global and not one.is_multicast and one not in _PROTOCOLS
        for one in (ip, *wrapped)
        if one is not None
    )


@cache
def trust() -> ssl.SSLContext:
    """The certificates that are trusted."""
    return ssl.create_default_context()


async def lookup(host: str, port: int, family: int) -> list[tuple[int, int, str]]:
    """The addresses of a name, as (family, protocol, address). Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
    return [(kind, protocol, str(place[0])) for kind, _, protocol, _, place in found]


async def fetch(context: RequestContext, pictures: list[GivenPicture]) -> None:
    """Replaces each picture that is given by URL with its bytes, in place. The bytes count as part of the
    request's body. With `image_urls` off all are refused. Raises PromptError and ApiError 429."""
    settings = context.service.settings
    wanted = [n for n, picture in enumerate(pictures) if picture.is_address]
    if settings.image_urls == "off" or not wanted:
        return
    from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

    connector = TCPConnector(resolver=public_resolver(), use_dns_cache=False, ssl=trust(), force_close=True)
    async with ClientSession(
        connector=connector,
        cookie_jar=DummyCookieJar(),
        auto_decompress=False,
        timeout=ClientTimeout(total=SECONDS),
        headers=HEADERS,
    ) as session:

        async def one(n: int) -> None:
            async with context.service.fetching:
                data = await fetched(session, pictures[n], settings.image_hosts(), context.body.grow)
            pictures[n] = replace(pictures[n], data=data)

        try:
            async with asyncio.TaskGroup() as group:  # the first failure cancels the others
                for n in wanted:
                    group.create_task(one(n))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


async def fetched(
    session: ClientSession, picture: GivenPicture, hosts: list[str], count: Callable[[int], None]
) -> bytes:
    """The bytes at a picture's URL, on one of `hosts`; calls `count` with the sizes received. The session
    uses `public_resolver`. Raises PromptError, and what `count` raises."""
    from aiohttp import ClientError

    try:
        async with asyncio.timeout(SECONDS):
            return await _followed(session, picture, hosts, count)
    except TimeoutError:
        raise picture.wrong(f"could not be fetched within {SECONDS:.0f} s") from None
    except NotPublic as error:
        raise picture.wrong(f"{error} is not a public address") from None
    except (ClientError, OSError, ValueError) as error:
        if isinstance(error, PromptError):
            raise
        raise picture.wrong(f"could not be fetched: {type(error).__name__}") from None


async def _followed(
    session: ClientSession, picture: GivenPicture, hosts: list[str], count: Callable[[int], None]
) -> bytes:
    from yarl import URL

    url = URL(picture.url)
    for _ in range(REDIRECTS + 1):
        _check(picture, url, hosts)
        async with session.get(url, allow_redirects=False) as response:
            if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                url = url.join(URL(response.headers["Location"]))
                continue
            if response.status != 200:
                raise picture.wrong(f"could not be fetched: {url.host} answered {response.status}")
            data = bytearray()
            async for piece in response.content.iter_chunked(PIECE):
                count(len(piece))
                data += piece
                if len(data) > MAX_BYTES:
                    raise picture.wrong(f"is larger than {MAX_BYTES // 1024**2} MiB")
            return bytes(data)
    raise picture.wrong(f"is redirected more than {REDIRECTS} times")


def _check(picture: GivenPicture, url: URL, hosts: list[str]) -> None:
    if url.scheme != "https" or not url.raw_host:
        raise picture.wrong(f"leads to {url.scheme or 'no'}://; only https:// is fetched, or a data URL read")
    host = url.raw_host.lower().rstrip(".")
    if not any(fnmatchcase(host, pattern) for pattern in hosts):
        raise picture.wrong(f"is of the host {host}, which is not one of --image-url-hosts")
    try:
        public = is_public(host)
    except ValueError:  # a name, resolved on connection
        public = not host.replace(".", "").isdigit()  # 127.1 is an address, for which no resolver is called
    if not public:
        raise NotPublic(host)


def public_resolver() -> Any:
    """aiohttp's resolver, restricted to public addresses. (It is not called for literal addresses.)"""
    from aiohttp.abc import AbstractResolver, ResolveResult

    class PublicResolver(AbstractResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            addresses = await lookup(host, port, family)
            if not all(is_public(address) for _, _, address in addresses):
                raise NotPublic(host)
            return [
                ResolveResult(
                    hostname=host,
                    host=address,
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST,
                )
                for kind, protocol, address in addresses
            ]

        async def close(self) -> None:
            pass

    return PublicResolver()
