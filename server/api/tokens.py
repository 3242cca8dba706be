"""/tokenize, /detokenize and /apply-template: the loaded model's own vocabulary, for clients that count.

/tokenize is llama-server's where the body has `content`, vLLM's where it has `prompt` or `messages`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from server.api.chat import prompt_of
from server.api.errors import bad_request
from server.api.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from server.api.request import off_loop, validate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.api.service import Service
    from server.engine import Vocab


class TokenizePromptRequest(BaseModel):
    """A text to ids, as vLLM has it."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest):
    """A conversation to the ids of the prompt that it would be answered with, as vLLM has it."""

    return_token_strs: bool | None = None


async def tokenize(service: Service, body: dict[str, Any], size: int) -> dict[str, Any]:
    """The ids of a text or a conversation. Raises ApiError 400."""
    if "content" not in body and body.get("messages") is not None:
        chat = await validate(TokenizeChatRequest, body, size)
        ids, _ = await off_loop(lambda: prompt_of(service, chat), size)
        return _counted(service, ids, strings=bool(chat.return_token_strs))
    vocab = service.backend.engine.vocab
    if "content" not in body and body.get("prompt") is not None:
        text = await validate(TokenizePromptRequest, body, size)
        ids = await off_loop(lambda: vocab.tokenize(text.prompt, special=True), size)
        ids = _begun(vocab, ids) if text.add_special_tokens else ids
        return _counted(service, ids, strings=bool(text.return_token_strs))
    request = await validate(TokenizeRequest, body, size)
    ids = await off_loop(lambda: vocab.tokenize(request.content, special=request.parse_special), size)
    ids = _begun(vocab, ids) if request.add_special else ids
    if request.with_pieces:
        return {"tokens": [{"id": token, "piece": _piece(vocab.spelling(token))} for token in ids]}
    return {"tokens": ids}


async def detokenize(service: Service, body: dict[str, Any], size: int) -> dict[str, Any]:
    """The text of `tokens`: llama-server's `content`, without control tokens, and vLLM's `prompt`, with them.

    Bytes that are no UTF-8 become U+FFFD. Raises ApiError 400.
    """
    request = await validate(DetokenizeRequest, body, size)
    vocab = service.backend.engine.vocab

    def texts() -> dict[str, Any]:
        if wrong := [token for token in request.tokens if not 0 <= token < vocab.size]:
            message = f"tokens: {wrong[0]} is not an id; they run from 0 to {vocab.size - 1}"
            raise bad_request(message, "tokens")
        kinds = {"content": vocab.token_bytes, "prompt": vocab.spelling}
        return {
            name: b"".join(map(spell, request.tokens)).decode("utf-8", "replace")
            for name, spell in kinds.items()
        }

    return await off_loop(texts, size)


async def apply_template(service: Service, body: dict[str, Any], size: int) -> dict[str, Any]:
    """The text of the prompt that a conversation would be answered with. Raises ApiError 400."""
    chat = await validate(ChatRequest, body, size)
    vocab = service.backend.engine.vocab

    def text() -> str:
        ids, _ = prompt_of(service, chat)
        return b"".join(map(vocab.spelling, ids)).decode("utf-8", "replace")

    return {"prompt": await off_loop(text, size)}


def _begun(vocab: Vocab, ids: list[int]) -> list[int]:
    return ids if vocab.bos_id is None else [vocab.bos_id, *ids]


def _counted(service: Service, ids: Sequence[int], *, strings: bool) -> dict[str, Any]:
    engine = service.backend.engine
    spelled = [engine.vocab.spelling(token).decode("utf-8", "replace") for token in ids] if strings else None
    return {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": engine.context_size,
        "token_strs": spelled,
    }


def _piece(spelling: bytes) -> str | list[int]:
    """As llama-server shows it: bytes where it is a part of a character."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return list(spelling)
