"""The chat page at `/`: files of `server/page/`, served as they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    import os

    from fastapi import FastAPI
    from fastapi import Response as FastAPIResponse
    from starlette.responses import Response
    from starlette.types import Scope

FOLDER = Path(__file__).parents[1] / "page"
PREFIX = "/page"

HEADERS = {
    # nothing from elsewhere, nothing inline: a model's answer cannot load, run or send anything
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def is_page(path: str) -> bool:
    """Whether `path` is the page or one of its files: no secret, and asked for before a key can be given."""
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
        return response


def install(app: FastAPI) -> None:
    """Adds the page and its files to the app."""

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> FastAPIResponse:
        return FileResponse(FOLDER / "index.html", headers=HEADERS)

    app.mount(PREFIX, PageFiles(directory=FOLDER), name="page")
