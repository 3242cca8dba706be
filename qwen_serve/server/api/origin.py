"""Keeps web pages away from a server without a key, since a page of any site can send requests to localhost.

A cross-site request has another Origin than this server. With DNS rebinding a site's name resolves to this
machine, and its requests have that name as Host (Ollama and Jupyter check it, too).
"""

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qwen_serve.server.api.errors import ApiError


class KnownSites:
    """Answers 403 to requests from other sites' pages, except on `open_paths`."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        hosts: Collection[str],
        origins: Collection[str],
        open_paths: Collection[str],
    ) -> None:
        """`host` is the address listened on. Unless it is loopback, every name is allowed. "*" in `hosts` or
        `origins` allows all."""
        self._app = app
        self._any_host = "*" in hosts or not (is_local(host))
        self._hosts = {name.lower() for name in hosts}
        self._any_origin = "*" in origins
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            headers = Headers(scope=scope)
            error = self._error(headers.get("host", ""), headers.get("origin"))
            if error is not None:
                await JSONResponse(error.body_for(scope["path"]), error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _error(self, host: str, origin: str | None) -> ApiError | None:
        name = host_name(host)
        if not (self._any_host or not host or name in self._hosts or is_address(name) or is_local(name)):
            return ApiError(
                403,
                f"this server is not known as {name[:80]!r}: --allowed-hosts adds names, a key allows any",
                code="host_not_allowed",
            )
        if origin is None or self._any_origin or origin.lower() in self._origins:
            return None
        if origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return None
        return other_site(origin)


class AllowedSites(CORSMiddleware):
    """CORS for the sites in `origins`.

    Browsers ask first, without a key (a preflight).
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        # newer versions of Starlette refuse private networks otherwise; older ones ignore this
        self.allow_private_network = True

    def preflight_response(self, request_headers: Headers) -> Response:
        """Starlette's CORS middleware, except that a refusal is an error object that says what to do."""
        origin = request_headers["origin"]
        if self.is_allowed_origin(origin):
            response = super().preflight_response(request_headers)
            if request_headers.get("access-control-request-private-network") == "true":
                response.headers["Access-Control-Allow-Private-Network"] = "true"
            return response
        error = other_site(origin)
        return JSONResponse(error.body(), error.status, headers={"Vary": "Origin"})

    async def simple_response(
        self, scope: Scope, receive: Receive, send: Send, request_headers: Headers
    ) -> None:
        """Starlette's response, if any origin is configured."""
        if self.allow_origins:
            await super().simple_response(scope, receive, send, request_headers)
        else:
            await self.app(scope, receive, send)


def other_site(origin: str) -> ApiError:
    """403 for a page of a site that is not configured."""
    return ApiError(
        403,
        f"pages of {origin[:80]!r} may not use this server; --allowed-origins names the sites that may",
        code="origin_not_allowed",
    )


def host_name(host: str) -> str:
    """The name of a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # an unclosed bracket
        return host


def is_address(name: str) -> bool:
    """Whether `name` is an IP address, which DNS cannot redirect."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_local(name: str) -> bool:
    """Whether `name` always means this machine."""
    if is_address(name):
        return ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")
