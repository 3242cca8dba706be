"""`python -m server`: serve one model over HTTP."""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from server.api import Backend, Service, create_app
from server.settings import Settings, SettingsError, describe, load_settings

if TYPE_CHECKING:
    from types import FrameType

logger = logging.getLogger("server")

CHAT_TEMPLATE = Path(__file__).parent.parent / "chat_templates" / "qwen3_5.jinja"
"""For a GGUF that brings no template of its own."""

KEEP_ALIVE_S = 75
SWITCH_INTERVAL_S = 0.0005


def main() -> None:
    """Runs until SIGTERM or SIGINT. Exits with 0 once drained, 1 if the model fails, 2 for bad settings."""
    try:
        settings, sources, flags = load_settings(sys.argv[1:])
    except SettingsError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if getattr(flags, "print_settings", False):
        print(describe(settings, sources))
        return
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn.access").disabled = True
    # the engine's thread waits at most so long for the event loop's, each time it comes back from llama.cpp
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logger.info("settings:\n%s", describe(settings, sources))

    app = create_app(settings, lambda: load(settings))
    server = DrainingServer(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            uds=None if settings.uds is None else str(settings.uds),
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            ws="none",
        ),
        app.state.service,
    )
    server.run()
    if settings.uds is not None:
        settings.uds.unlink(missing_ok=True)
    logging.shutdown()
    # not sys.exit: a model that is still loading sits inside llama.cpp, and would be waited for
    os._exit(app.state.service.status == "failed")


def load(settings: Settings) -> Backend:
    """Loads and warms up the model; blocks for seconds to minutes."""
    from server.api.sampling import sampling_defaults
    from server.chat import Prompter
    from server.engine import Engine

    engine = Engine(settings.engine())
    try:
        template = engine.metadata.get("tokenizer.chat_template")
        if settings.chat_template is not None or template is None:
            template = (settings.chat_template or CHAT_TEMPLATE).read_text(encoding="utf-8")
        prompter = Prompter(engine.vocab, template)
        defaults = sampling_defaults(engine.metadata, greedy=settings.greedy)
        engine.start()
        engine.wait_ready()
    except BaseException:
        engine.close()
        raise
    gc.collect()
    gc.freeze()  # what is there now stays: no collection need look at it, and hold the engine's thread up
    logger.info("ready: %s, up to %d tokens a sequence", settings.model_id, engine.context_size)
    return Backend(engine, prompter, defaults)


class DrainingServer(uvicorn.Server):
    """Keeps listening while it drains, so that probes see 503 rather than a refused connection."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: out, whatever still runs."""
        if self._service.status == "draining":
            os._exit(128 + sig)
        logger.info("draining: %d requests in flight (again to stop at once)", self._service.in_flight)
        self._service.drain()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's ten looks a second at whether it should stop."""
        if self._service.drained or self._service.status == "failed":
            self.should_exit = True
        return await super().on_tick(counter)


if __name__ == "__main__":
    main()
