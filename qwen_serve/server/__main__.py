"""`python -m qwen_serve.server`: serve one model over HTTP."""

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import uvicorn

from qwen_serve.server.about import data_folder, llama_version, own_version
from qwen_serve.server.api import Backend, BoundedConfig, Service, create_app
from qwen_serve.server.api.connection import BoundedProtocol
from qwen_serve.server.listening import ListenError, exposures, listen
from qwen_serve.server.settings import Settings, describe, describe_chosen
from qwen_serve.server.settings_sources import SettingsError, load_settings, unknown_variables

logger = logging.getLogger("server")

CHAT_TEMPLATE = data_folder("chat_templates") / "qwen3_5.jinja"
"""The template for a GGUF that has none."""

KEEP_ALIVE_S = 75
SWITCH_INTERVAL_S = 0.0005

FAILED, BAD_SETTINGS, CUT_SHORT, CANNOT_LISTEN = 1, 2, 3, 4
"""Exit codes besides 0."""
CUT_S = 1.0
"""Seconds in which requests that are ended early can send their error."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs until SIGTERM, SIGINT or SIGHUP.

    Exits with 0 once drained, 1 if the model fails, 2 for bad settings, 3 if requests had to be ended early
    and 4 if the address is taken.
    """
    try:
        settings, sources, flags = load_settings(sys.argv[1:] if arguments is None else arguments)
    except SettingsError as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_SETTINGS)
    if getattr(flags, "print_settings", False):
        print(describe(settings, sources))
        return
    configure_logging(settings.log_level)
    # bounds how long the engine's thread waits for the GIL when it returns from llama.cpp
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logger.info("qwen-serve %s, llama-cpp-python %s", own_version(), llama_version())
    for warning in unknown_variables():
        logger.warning("%s", warning)
    if chosen := describe_chosen(settings, sources):
        logger.info("settings: %s", chosen)
    for warning in exposures(settings, sources):
        logger.warning("%s", warning)

    app = create_app(settings, lambda: load(settings))
    config = BoundedConfig(
        app,
        settings,
        host=settings.host,
        port=settings.port,
        uds=None if settings.uds is None else str(settings.uds),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    try:
        config.load()
        sockets = listen(settings)
    except OSError as error:
        logger.error("--ssl-certfile and --ssl-keyfile are not a certificate and its key: %s", error)
        sys.exit(BAD_SETTINGS)
    except ListenError as error:
        logger.error("cannot listen: %s", error)
        sys.exit(CANNOT_LISTEN)
    server = DrainingServer(config, app.state.service)
    server.run(sockets)
    if settings.uds is not None:
        settings.uds.unlink(missing_ok=True)
    logging.shutdown()
    # not sys.exit, which would wait for a model that is still loading inside llama.cpp
    os._exit(FAILED if app.state.service.status == "failed" else server.status)


def load(settings: Settings, **forced: Any) -> Backend:
    """Loads and warms up the model, with values of `ForcedSettings`; blocks for seconds to minutes."""
    from qwen_serve.llamacpp.aborts import end_with_a_line
    from qwen_serve.server.api.fields.sampling import sampling_defaults
    from qwen_serve.server.chat import Prompter
    from qwen_serve.server.engine import Engine

    end_with_a_line(_abort_line, FAILED)
    engine = Engine(settings.engine(**forced))
    try:
        template = engine.metadata.get("tokenizer.chat_template")
        if settings.chat_template is not None or template is None:
            template = (settings.chat_template or CHAT_TEMPLATE).read_text(encoding="utf-8")
        prompter = Prompter(engine.vocab, template)
        if prompter.spelt_tags:
            logger.warning(
                "%s: no tokens of this vocabulary, so text that looks like these tags is taken for them",
                ", ".join(prompter.spelt_tags),
            )
        defaults = sampling_defaults(
            engine.metadata, greedy=settings.greedy, source=settings.sampling_defaults
        )
        engine.start()
        engine.wait_ready()
    except BaseException:
        engine.close()
        raise
    gc.collect()
    gc.freeze()  # no collection scans the objects that exist now, which would delay the engine's thread
    return Backend(engine, prompter, defaults)


def _abort_line(message: str) -> str:
    from qwen_serve.server.engine import bounded_by

    bound = bounded_by()
    why = (
        f"memory is limited by {bound}: raise that limit, or lower ctx_size or parallel"
        if bound
        else ("if memory ran out, lower ctx_size or parallel")
    )
    return f"ERROR llama.cpp stopped ({message}); {why}"


def configure_logging(level: str) -> None:
    """Sets up the root logger, on stderr. uvicorn logs problems, but not its start and stop."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    logging.getLogger("uvicorn.access").disabled = True
    if level == "info":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


class DrainingServer(uvicorn.Server):
    """Keeps listening while it drains, so that probes see 503 rather than a refused connection."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._said_ready = self._dropped_unread = False
        self.status = 0
        """The process's exit code."""
        faulthandler.register(signal.SIGALRM, chain=True)  # logs the stack, then the signal ends the process
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup sets SIG_IGN
            signal.signal(signal.SIGHUP, self.handle_exit)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Logs the address; by then the model is loading."""
        await super().startup(sockets)
        if self.started:
            logger.info("listening on %s; loading %s", self.address, self._service.settings.model)

    def _about(self) -> str:
        settings, engine = self._service.settings, self._service.backend.engine
        parts = [
            settings.model_id,
            f"{engine.settings.parallel} sequences of up to {engine.context_size:,} tokens",
            "sees pictures" if engine.encoder else "text alone",
            "an API key" if self._service.keys else "no API key",
        ]
        return ", ".join([*parts, *["chat page at /"] * settings.page])

    @property
    def address(self) -> str:
        """The address, with the actual port if 0 was given."""
        if self.config.uds:
            return f"unix:{self.config.uds}"
        scheme = "https" if self.config.is_ssl else "http"
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drains on the first signal. Exits on the second, even if requests are still running."""
        if self._service.status == "draining":
            os._exit(128 + sig)
        logger.info("draining: %d requests in flight (again to stop at once)", self._service.in_flight)
        self._service.drain()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's shutdown. The watchdog is off, since the engine may save for a while at its end."""
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second to check for shutdown; each call resets the watchdog."""
        if seconds := self._service.settings.watchdog:
            # a thread in C, which needs no Python lock. A failed allocation inside an extension can leave a
            # lock taken for ever, after which /ping and signals no longer work
            try:
                faulthandler.dump_traceback_later(seconds, exit=True)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except RuntimeError:  # no memory for the thread: use a signal, which PID 1 would ignore
                signal.setitimer(signal.ITIMER_REAL, seconds)
        if not self._said_ready and self._service.status == "ready":
            self._said_ready = True
            logger.info("ready at %s with %s", self.address, self._about())
        if self._service.status == "draining" and not self._dropped_unread:
            self._dropped_unread = True  # later requests are refused before their bodies are read
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.drop_unread()
        if self._service.drained or self._service.status == "failed":
            self.should_exit = True
        elif self._service.overdue and self._service.cut_short():
            logger.warning("cut short: %d requests", self._service.in_flight)
            self.status = CUT_SHORT
        elif self._service.overdue and self._service.overdue > CUT_S:
            self.should_exit = True
        return await super().on_tick(counter)


if __name__ == "__main__":
    main()
