"""A request's LoRA adapters: one by name in `model`, as in vLLM, or several by number in `lora`, as in
llama-server."""

from pydantic import BaseModel, ConfigDict, Field

from qwen_serve.server.api.errors import ApiError, bad_request
from qwen_serve.server.engine import MOST_ADAPTERS, Adapters
from qwen_serve.server.settings import Settings


class LoraChoice(BaseModel):
    """llama-server's: an adapter by its number, and its scale."""

    model_config = ConfigDict(strict=True)

    id: int = Field(ge=0)
    scale: float = Field(ge=-100, le=100)


def known_model(settings: Settings, given: str | None) -> str:
    """The name of the model or adapter that a request's `model` asks for. Raises ApiError 404.

    A server without adapters accepts any name; one with adapters accepts theirs and the model's own.
    """
    names, model = [*settings.adapters], (given or settings.model_id).removesuffix(":latest")
    if names and model not in (*names, settings.model_id):
        there = ", ".join([settings.model_id, *names])
        message = f"model: there is no {given!r}; this server has {there} (the model, then its adapters)"
        raise ApiError(404, message, param="model", code="model_not_found")
    return model


def adapters_of(settings: Settings, given: str | None, chosen: list[LoraChoice]) -> Adapters:
    """The adapters to apply for a request's `model` and `lora`. Raises ApiError 400 for an unknown adapter in
    `lora`, and as `known_model`."""
    names, model = [*settings.adapters], known_model(settings, given)
    if not chosen:
        return ((names.index(model), 1.0),) if model in names else ()
    if not names:
        raise bad_request("lora", "this server has none; it is started with them (--lora NAME=FILE.gguf)")
    if model in names:
        raise bad_request("lora", f"model names the adapter {model!r} already; leave one of the two out")
    scales = {one.id: one.scale for one in chosen}
    if len(scales) < len(chosen):
        raise bad_request("lora", "an adapter is in it twice")
    if (wrong := max(scales)) >= len(names):
        there = ", ".join(f"{index} ({name})" for index, name in enumerate(names))
        raise bad_request("lora", f"there is no adapter {wrong}; there are {there}")
    applied = tuple(sorted((index, scale) for index, scale in scales.items() if scale))
    if len(applied) > MOST_ADAPTERS:
        raise bad_request(
            "lora", f"{len(applied)} adapters at once; at most {MOST_ADAPTERS} are applied to a request"
        )
    return applied
