"""/tokenize and /detokenize: the loaded model's own vocabulary, for clients that count."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.api.body import body_of, documented, off_loop, validate
from server.api.errors import bad_request
from server.api.schemas import DetokenizeRequest, TokenizeRequest
from server.api.service import service_of

router = APIRouter()


@router.post("/tokenize", openapi_extra=documented(TokenizeRequest))
async def tokenize(http: Request) -> dict[str, Any]:
    """The ids of `content`."""
    service = service_of(http)
    body, size = await body_of(http, service)
    request = await validate(TokenizeRequest, body, size)
    vocab = service.backend.engine.vocab
    ids = await off_loop(lambda: vocab.tokenize(request.content, special=request.parse_special), size)
    if request.add_special and vocab.bos_id is not None:
        ids = [vocab.bos_id, *ids]
    return {"tokens": ids}


@router.post("/detokenize", openapi_extra=documented(DetokenizeRequest))
async def detokenize(http: Request) -> dict[str, Any]:
    """The text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
    service = service_of(http)
    body, size = await body_of(http, service)
    request = await validate(DetokenizeRequest, body, size)
    vocab = service.backend.engine.vocab
    if wrong := [token for token in request.tokens if not 0 <= token < vocab.size]:
        raise bad_request(f"tokens: {wrong[0]} is not an id; they run from 0 to {vocab.size - 1}", "tokens")
    text = await off_loop(lambda: b"".join(map(vocab.token_bytes, request.tokens)), size)
    return {"content": text.decode("utf-8", "replace")}
