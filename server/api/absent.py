"""Endpoints of other servers that this one does not offer: 501, for clients that ask for them."""

from __future__ import annotations

from fastapi import APIRouter, Request

from server.api.errors import ApiError

ABSENT = {
    "embeddings": "/v1/embeddings /embeddings /embedding /pooling",
    "reranking, scoring and classification": "/v1/rerank /v2/rerank /rerank /v1/reranking /reranking "
    "/v1/score /score /classify",
    "images": "/v1/images/{rest:path}",
    "audio": "/v1/audio/{rest:path}",
    "moderation": "/v1/moderations",
    "LoRA adapters": "/v1/load_lora_adapter /v1/unload_lora_adapter /lora-adapters",
    "files, batches and fine-tuning": "/v1/files /v1/files/{rest:path} /v1/batches /v1/batches/{rest:path} "
    "/v1/messages/batches /v1/messages/batches/{rest:path} /v1/fine_tuning/{rest:path}",
    "kept responses and conversations": "/v1/responses/{rest:path} /v1/conversations "
    "/v1/conversations/{rest:path} /v1/assistants /v1/threads",
    "infilling": "/infill",
}
"""What -> the paths that are for it."""

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]

router = APIRouter()


def refuse(what: str, path: str) -> None:
    """Have `path` answer 501, whatever the method."""

    @router.api_route(path, methods=METHODS, include_in_schema=False)
    async def absent(http: Request) -> None:
        message = f"{http.method} {http.url.path}: {what}: not supported by this server"
        raise ApiError(501, message, code="not_supported")


for _what, _paths in ABSENT.items():
    for _path in _paths.split():
        refuse(_what, _path)
