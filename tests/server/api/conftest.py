"""A real HTTP server, on a free port and a thread of its own, over the scripted engine."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn

from qwen_serve.server.api import Backend, BoundedConfig, Service, create_app
from qwen_serve.server.api.fields.sampling import sampling_defaults
from qwen_serve.server.chat import Prompter
from qwen_serve.server.engine import Engine
from qwen_serve.server.settings import Settings
from tests.server.api.fakes import FakeEngine, Script
from tests.waiting import wait_until

TEMPLATE = Path(__file__).parents[3] / "chat_templates" / "qwen3_5.jinja"


@dataclass
class Server:
    """The server's address, and the objects behind it."""

    http: httpx.Client
    engine: FakeEngine
    service: Service

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return self.post("/v1/chat/completions", **{"messages": messages, **body})


Start = Callable[..., Server]


@contextmanager
def running(app: Any, settings: Settings) -> Iterator[str]:
    """Serve `app`. Yields its address."""
    server = uvicorn.Server(
        BoundedConfig(app, settings, port=0, log_config=None, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts servers, from a script, settings by name, and arguments of FakeEngine."""
    with starter(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """`start` for servers that the tests of a module share: the same arguments give the same server."""
    with starter(tmp_path_factory.mktemp("models")) as start:
        servers: dict[Any, Server] = {}

        def start_once(script: Script | str, **options: Any) -> Server:
            said = script if isinstance(script, str) else script.__code__
            key = said, repr(sorted(options.items()))
            if key not in servers:
                servers[key] = start(script, **options)
            return servers[key]

        yield start_once


@contextmanager
def starter(folder: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(
            script: Script | str, *, load: Callable[[Backend], Backend] | None = None, **options: Any
        ) -> Server:
            model = folder / "fake.gguf"
            model.touch()
            chosen = {name: options.pop(name) for name in list(options) if name in Settings.model_fields}
            settings = Settings(model=model, **chosen)
            engine = FakeEngine((lambda _: script) if isinstance(script, str) else script, **options)

            def make() -> Backend:
                real = cast(Engine, engine)
                template = settings.chat_template or TEMPLATE
                prompter = Prompter(real.vocab, template.read_text(encoding="utf-8"))
                defaults = sampling_defaults(
                    engine.metadata, greedy=settings.greedy, source=settings.sampling_defaults
                )
                backend = Backend(real, prompter, defaults)
                return load(backend) if load else backend

            app = create_app(settings, make)
            http = stack.enter_context(
                httpx.Client(base_url=stack.enter_context(running(app, settings)), timeout=30)
            )
            server = Server(http, engine, app.state.service)
            if load is None:
                wait_until(lambda: server.service.status in ("ready", "sleeping"))
            return server

        yield start
