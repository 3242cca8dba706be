"""`python -m tests.server.stuck`: the server, whose event loop POST /stuck holds for ever. With NO_THREAD set
there is no memory for the watchdog's thread."""

import faulthandler
import os
import threading
from typing import Any

from fastapi import FastAPI

import qwen_serve.server.__main__ as program


def create_app(*arguments: Any) -> FastAPI:
    app = original(*arguments)

    @app.post("/stuck")
    async def stick() -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    return app


def no_thread(*_: Any, **__: Any) -> None:
    raise RuntimeError("unable to start watchdog thread")


if os.environ.get("NO_THREAD"):
    faulthandler.dump_traceback_later = no_thread

original = program.create_app  # type: ignore[attr-defined]
program.create_app = create_app  # type: ignore[attr-defined, assignment]

if __name__ == "__main__":
    program.main()
