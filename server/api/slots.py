"""/slots, as llama-server has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen_serve.server.api.errors import ApiError
from qwen_serve.server.api.fields.sampling import llama_settings
from qwen_serve.server.engine import slot_states

if TYPE_CHECKING:
    from qwen_serve.server.engine import Engine


def slots(engine: Engine, *, fail_without: bool = False) -> list[dict[str, Any]]:
    """What each slot does. Raises ApiError 503 where none is idle and the request wants to be told so."""
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
