"""The chat page at `/`: the files of `qwen_serve/server/page/`, compressed for clients that accept it."""

import base64
import gzip
import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path

from fastapi import (
    FastAPI,
    Request,
)
from fastapi import Response as FastAPIResponse
from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parents[1] / "page"
PREFIX = "/page"

HEADERS = {
    # no external and no inline code, so that a model's answer cannot load, run or send anything
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; frame-src 'self'; manifest-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}

SANDBOX = "sandbox.html"
"""The frame in which code of the model runs: without the page's origin and without any network."""

TEXTS = {".html", ".js", ".mjs", ".css", ".svg", ".webmanifest"}


def is_page(path: str) -> bool:
    """Whether `path` is the page or one of its files. They are public: the page loads before its user can
    enter a key."""
    return path == "/" or path.startswith(f"{PREFIX}/")


class PageFiles(StaticFiles):
    """The page's files, with HEADERS."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        if Path(full_path).name == SANDBOX:
            response.headers["Content-Security-Policy"] = sandbox_policy(Path(full_path))
        return compressed(response, scope)


def sandbox_policy(path: Path) -> str:
    """The policy of the sandbox's frame. Its own script runs, and workers that it makes of code. They inherit
    the rest, which allows nothing."""
    (script,) = re.findall(r"<script>(.*?)</script>", path.read_text(encoding="utf-8"), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"sandbox allow-scripts; default-src 'none'; script-src 'sha256-{digest}'; worker-src blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )


def compressed(response: Response, scope: Scope) -> Response:
    """The response in gzip, if it is a complete text and the client accepts that."""
    if not isinstance(response, FileResponse) or Path(response.path).suffix not in TEXTS:
        return response
    asked = Headers(scope=scope)
    if "gzip" not in asked.get("accept-encoding", "") or "range" in asked:
        return response
    path = Path(response.path)
    body = _gzipped(path, path.stat().st_mtime_ns)
    headers = {**response.headers, "content-encoding": "gzip", "content-length": str(len(body))}
    return Response(body, response.status_code, headers)


@lru_cache(maxsize=64)
def _gzipped(path: Path, _: int) -> bytes:
    """A file's bytes in gzip. The modification time is part of the cache key."""
    return gzip.compress(path.read_bytes(), mtime=0)


def install(app: FastAPI) -> None:
    """Adds the page and its files to the app."""

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(http: Request) -> FastAPIResponse:
        return compressed(FileResponse(FOLDER / "index.html", headers=HEADERS), http.scope)

    app.mount(PREFIX, PageFiles(directory=FOLDER), name="page")
