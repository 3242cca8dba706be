"""The application: settings and a way to load the model in, an ASGI app out."""

from __future__ import annotations

from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from anyio import to_thread
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from server.api import errors
from server.api.metrics import Metrics
from server.api.middleware import RequireKey, Watch
from server.api.routes import ROUTERS, paths
from server.api.service import Backend, Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from server.settings import Settings


def create_app(settings: Settings, load: Callable[[], Backend]) -> FastAPI:
    """The app, with its Service in `app.state.service`. `load` runs on a thread once the app starts up."""
    service = Service(settings, Metrics(), load)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await to_thread.run_sync(service.close)

    app = FastAPI(title="qwen-serve", version=_version(), lifespan=lifespan, redirect_slashes=False)
    app.state.service = service
    app.state.paths = paths()
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    if keys := settings.api_keys():
        app.add_middleware(RequireKey, keys=keys)
    if origins := settings.origins():  # outside of the keys: a browser asks without one whether it may ask
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Watch, service=service)  # added last: outermost, so that it sees refusals too
    return app


def _version() -> str:
    try:
        return version("qwen-serve")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"
