"""The application: makes an ASGI app from settings and a function that loads the model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from anyio import to_thread
from fastapi import FastAPI

from qwen_serve.server.about import own_version
from qwen_serve.server.api import error_response, mcp_proxy, page
from qwen_serve.server.api.middleware import OPEN_PATHS, PROBES, RequestLogMiddleware, RequireKey
from qwen_serve.server.api.observe.metrics import Metrics
from qwen_serve.server.api.observe.throughput import report_throughput
from qwen_serve.server.api.observe.tracing import configured_tracer
from qwen_serve.server.api.openapi import describe
from qwen_serve.server.api.origin import AllowedSites, KnownSites
from qwen_serve.server.api.routes import KNOWN, ROUTERS, endpoints
from qwen_serve.server.api.service import Backend, Service
from qwen_serve.server.settings import Settings


def create_app(settings: Settings, load: Callable[[], Backend]) -> FastAPI:
    """The app, with its Service in `app.state.service`. `load` runs on a thread once the app starts up."""
    service = Service(settings, Metrics(), load, KNOWN)
    tracer = configured_tracer()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        tasks = [asyncio.create_task(report_throughput(service))]
        if settings.sleep_idle_seconds is not None:
            tasks.append(asyncio.create_task(service.sleep_when_idle(settings.sleep_idle_seconds)))
        yield
        for task in tasks:
            task.cancel()
        await to_thread.run_sync(service.close)
        if tracer is not None:
            await to_thread.run_sync(tracer.close)

    app = FastAPI(title="qwen-serve", version=own_version(), lifespan=lifespan, redirect_slashes=False)
    app.state.service = service
    app.state.routes = endpoints()
    app.state.paths = sorted({route.path_format for route in endpoints() if route.include_in_schema})
    error_response.install(app)
    for router in ROUTERS:
        app.include_router(router)
    if settings.page:
        page.install(app)
        mcp_proxy.install(app, settings.mcp_servers())
    keys, origins = settings.api_keys(), settings.origins() or []
    unlocked = OPEN_PATHS if settings.open_metrics else PROBES
    describe(app, key=bool(keys), unlocked=unlocked)
    if keys:
        app.add_middleware(RequireKey, keys=[key.key for key in keys], unlocked=unlocked)
    elif settings.uds is None:  # web pages cannot reach a Unix socket
        hosts = [name.strip() for name in settings.allowed_hosts.split(",")]
        app.add_middleware(
            KnownSites, host=settings.host, hosts=hosts, origins=origins, open_paths=OPEN_PATHS
        )
    if origins or keys:  # before the key check, since a browser's preflight request has no key
        app.add_middleware(AllowedSites, origins=origins)
    # added last, so it is the outermost and sees refusals, too
    app.add_middleware(RequestLogMiddleware, service=service, tracer=tracer)
    return app
