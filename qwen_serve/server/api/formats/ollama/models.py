"""Ollama's endpoints about models, of which the server has one."""

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.fields.lora import known_model
from qwen_serve.server.api.service import Service

OLLAMA_VERSION = "0.12.0"
"""The Ollama version whose API this is. Clients require one that supports tools and thinking."""

NEVER = "9999-12-31T23:59:59Z"


class ShowRequest(BaseModel):
    """The model, by the names that a chat may use for it."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def model_tags(service: Service) -> dict[str, Any]:
    """The list of models, which has one."""
    return {"models": [{**_entry(service), "modified_at": _started(service)}]}


def running_models(service: Service) -> dict[str, Any]:
    """The list of loaded models: the one model, unless it sleeps."""
    if service.status == "sleeping":
        return {"models": []}
    engine, left = service.backend.engine, service.idle_left
    about = {
        "expires_at": NEVER if left is None else _time(time.time() + left),
        "size_vram": engine.size_bytes if engine.components.device_runs_alone else 0,
        "context_length": engine.context_size,
    }
    return {"models": [{**_entry(service), **about}]}


async def show(context: RequestContext, request: ShowRequest) -> Response:
    """Describe the model, as Ollama does. Raises ApiError 404, as a chat with this model does."""
    known_model(context.service.settings, request.model or request.name)
    return JSONResponse(context.service.tell(model_details))


def model_details(service: Service) -> dict[str, Any]:
    """The description of the model."""
    backend = service.backend
    engine = backend.engine
    params = backend.defaults.of("instruct")
    parameters = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "num_ctx": engine.context_size,
    }
    capabilities = ["completion", "tools"]
    capabilities += ["thinking"] if backend.prompter.can_think else []
    capabilities += ["vision"] if engine.encoder is not None else []
    return {
        "modelfile": f"# served by qwen-serve\nFROM {service.settings.model.name}\n",
        "parameters": "\n".join(f"{name:30} {value}" for name, value in parameters.items()),
        "template": backend.prompter.template,
        "license": engine.metadata.get("general.license", ""),
        "details": _details(service),
        "model_info": {"general.parameter_count": engine.n_params, **_typed(engine.metadata)},
        "capabilities": capabilities,
        "modified_at": _started(service),
    }


def _entry(service: Service) -> dict[str, Any]:
    name, engine = service.settings.model_id, service.backend.engine
    identity = f"{name} {engine.description} {engine.size_bytes}"  # hashing the file would take long
    return {
        "name": name,
        "model": name,
        "size": engine.size_bytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: Service) -> dict[str, Any]:
    engine = service.backend.engine
    family = engine.metadata.get("general.architecture", "")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{engine.n_params / 1e9:.1f}B"
        if engine.n_params > 1e8
        else f"{engine.n_params / 1e6:.1f}M",
        "quantization_level": engine.description.split(" ", 2)[-1],
    }


def _typed(metadata: dict[str, str]) -> dict[str, str | int]:
    """The file's metadata without long texts; numbers are converted."""
    return {
        key: int(text) if text.isdecimal() else text
        for key, text in metadata.items()
        if not key.startswith("tokenizer.chat_template") and len(text) < 256
    }


def _started(service: Service) -> str:
    return _time(service.started)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
