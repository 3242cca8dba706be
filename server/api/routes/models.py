"""/v1/models: the one model there is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.api.errors import ApiError
from server.api.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def models(http: Request) -> dict[str, Any]:
    """A list of one."""
    return {"object": "list", "data": [card(service_of(http))]}


@router.get("/v1/models/{model:path}")
async def model(http: Request, model: str) -> dict[str, Any]:
    """The card of the model called `model`; 404 for any other name."""
    service = service_of(http)
    if model != service.settings.model_id:
        message = f"there is no model {model!r}; this server has {service.settings.model_id!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return card(service)


def card(service: Service) -> dict[str, Any]:
    """The model as OpenAI lists it, with its context as vLLM calls it and `meta` as llama-server does."""
    engine = service.backend.engine
    metadata = engine.metadata
    return {
        "id": service.settings.model_id,
        "object": "model",
        "created": service.started,
        "owned_by": "qwen-serve",
        "max_model_len": engine.context_size,
        "meta": {
            "name": metadata.get("general.name"),
            "architecture": metadata.get("general.architecture"),
            "description": engine.description,
            "n_params": engine.n_params,
            "size": engine.size_bytes,
            "n_vocab": engine.vocab.size,
            "n_ctx": engine.context_size,
            "n_ctx_train": int(metadata[f"{metadata['general.architecture']}.context_length"]),
            "n_parallel": engine.settings.parallel,
            "license": metadata.get("general.license"),
        },
    }
