"""llama-server's /slots."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from qwen_serve.common.files import NO_ROOM
from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import ApiError, bad_request
from qwen_serve.server.api.fields.sampling import llama_settings
from qwen_serve.server.api.limits import in_thread
from qwen_serve.server.api.request import ensure_loaded, until_gone
from qwen_serve.server.api.tenant import salt_of
from qwen_serve.server.engine import Engine, PrefixFileError, restore_prefixes, save_prefixes, slot_states

FILE_WORK = ThreadPoolExecutor(1, "slot-files")
"""A thread for files, one at a time, so that no step and no other request waits for a slow disk."""

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class SlotActionRequest(BaseModel):
    """A file in the folder of `--slot-save-path`; `erase` needs none."""

    model_config = ConfigDict(strict=True)

    filename: str = ""
    cache_salt: str | None = None
    """The salt of the requests whose prompts are saved, restored or erased."""


async def slot_action(context: RequestContext, request: SlotActionRequest) -> Response:
    """Saves the prompt cache, which all slots share, to a file (`?action=save`), reads it back (`restore`),
    or empties it (`erase`)."""
    service, query = context.service, context.http.query_params
    folder, action = service.settings.slot_save_path, query.get("action")
    slot = context.http.path_params["slot"]
    if folder is None:
        message = "POST /slots: start the server with --slot-save-path FOLDER for it"
        raise ApiError(501, message, code="not_supported")
    if action not in ("save", "restore", "erase"):
        raise bad_request("action", "must be save, restore or erase")
    salt = salt_of(context.key if service.settings.prefix_by_key else "", request.cache_salt)
    path = folder if action == "erase" else _path(folder, request.filename, salt)
    await ensure_loaded(context)
    engine = service.backend.engine
    if not slot.isdecimal() or len(slot) > 4 or int(slot) >= engine.settings.parallel:
        raise bad_request("id_slot", f"there is no slot {slot[:9]!r}; they run from 0")
    began = perf_counter()
    about: dict[str, Any] = {"id_slot": int(slot)}
    if action == "erase":
        future = engine.between_steps(partial(engine.components.cache.erase, salt))
        return JSONResponse(
            {**about, "n_erased": await until_gone(context.http, asyncio.wrap_future(future))}
        )
    work = save_prefixes if action == "save" else restore_prefixes
    try:
        found = await until_gone(context.http, in_thread(partial(work, engine, path, salt), 0, FILE_WORK))
    except PrefixFileError as error:
        raise bad_request("filename", f"{request.filename} is not used: {error}") from error
    except OSError as error:  # its text has the path, which is not the client's business
        wrong = bad_request(
            "filename", f"{request.filename} is not saved: {error.strerror or type(error).__name__}"
        )
        if error.errno in NO_ROOM:
            wrong.status, wrong.code = 507, "no_room"
        raise wrong from error
    done, moved = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    timings = {f"{action}_ms": (perf_counter() - began) * 1000}
    about |= {"filename": request.filename, done: found.longest, moved: found.size, "timings": timings}
    if found.damage:
        about["not_restored"] = f"the rest is not used: {found.damage}"
    return JSONResponse(about)


def _path(folder: Path, name: str, salt: str) -> Path:
    """The path of a file; requests with another salt have another file of the same name."""
    if not FILE_NAME.fullmatch(name):
        raise bad_request("filename", "must be letters, digits, _, - and ., and no path")
    return folder / (f"{salt[:16]}-{name}" if salt else name)


def slots(engine: Engine, *, fail_without: bool = False) -> list[dict[str, Any]]:
    """What each slot does. With `fail_without`, raises ApiError 503 if no slot is idle."""
    states = slot_states(engine)
    if fail_without and all(state.params for state in states):
        raise ApiError(503, "no slot is idle", code="no_slot", headers={"Retry-After": "1"})
    found: list[dict[str, Any]] = []
    for state in states:
        busy = state.params is not None
        about: dict[str, Any] = {
            "id": state.id,
            "n_ctx": engine.context_size,
            "speculative": engine.settings.speculation != "off",
            "is_processing": busy,
        }
        if state.params is not None:
            about |= {
                "n_prompt_tokens": state.prompt_tokens,
                "n_prompt_tokens_processed": state.processed,
                "n_prompt_tokens_cache": state.cached,
                "params": llama_settings(state.params),
                "next_token": [
                    {"has_next_token": True, "n_remain": state.remain, "n_decoded": state.decoded}
                ],
            }
        found.append(about)
    return found
