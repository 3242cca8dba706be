"""`python -m tests.server.stuck`: the server, whose event loop POST /stuck holds for ever."""

from __future__ import annotations

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


original = program.create_app  # type: ignore[attr-defined]
program.create_app = create_app  # type: ignore[attr-defined, assignment]

if __name__ == "__main__":
    program.main()
