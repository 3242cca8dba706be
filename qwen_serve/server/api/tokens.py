"""/tokenize, /detokenize, /apply-template, .../render, /tokenizer_info: the model's vocabulary.

They are for clients that count tokens, and for routers that match prefixes. /tokenize is llama-server's if
the body has `content`, and vLLM's if it has `prompt` or `messages`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import bad_request
from qwen_serve.server.api.formats.chat import ChatRequest, check_uncut, prompt_of
from qwen_serve.server.api.formats.completions import CompletionRequest
from qwen_serve.server.api.formats.responses.request import ResponsesRequest
from qwen_serve.server.api.request import encode_images, ensure_loaded, on_thread, prepared
from qwen_serve.server.api.service import Service
from qwen_serve.server.api.serving import truncated
from qwen_serve.server.chat.pictures import GivenPicture, counted
from qwen_serve.server.engine import TokenBudget, Vocab

MAX_TOKENS = 2**18
"""Most tokens that /tokenize returns and /detokenize accepts: the longest context of any model."""


class TokenizeRequest(BaseModel):
    """Text to ids, in llama-server's format. `add_special` puts the beginning-of-sequence token first, if the
    model has one."""

    model_config = ConfigDict(strict=True)

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class TokenizePromptRequest(BaseModel):
    """Text to ids, in vLLM's format."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest):
    """A conversation, whose prompt's token ids are returned, as in vLLM."""

    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Ids to text."""

    model_config = ConfigDict(strict=True)

    tokens: list[int] = Field(fail_fast=True)


def asked(body: dict[str, Any]) -> type[TokenizeRequest | TokenizePromptRequest | TokenizeChatRequest]:
    """The schema of a /tokenize body."""
    if "content" not in body and body.get("messages") is not None:
        return TokenizeChatRequest
    return (
        TokenizePromptRequest if "content" not in body and body.get("prompt") is not None else TokenizeRequest
    )


def bounded(interrupt: Callable[[], None], field: str) -> TokenBudget:
    """A budget that raises ApiError 400 above `MAX_TOKENS`."""
    wrong = bad_request(field, f"more than {MAX_TOKENS:,} tokens; send it in parts")
    return TokenBudget(MAX_TOKENS + 1, interrupt, lambda *_: wrong)


async def with_prompt(
    context: RequestContext, request: ChatRequest, answer: Callable[[list[int]], Any]
) -> Response:
    """Responds with `answer` of a conversation's prompt ids. A picture is its placeholder token, repeated for
    each of its tokens. Raises ApiError 400."""
    service = context.service
    await ensure_loaded(context, request.check_messages)
    engine = service.backend.engine
    given: list[GivenPicture] = []
    bare: list[int] = []

    def answered(interrupt: Callable[[], None]) -> Response | None:
        given.clear()  # `work` may begin twice
        pictures = None if engine.encoder is None else given
        bare[:], _ = prompt_of(service, request, bounded(interrupt, "messages"), pictures)
        if given:
            check_uncut(request)
            return None
        return JSONResponse(answer(bare))

    def insert(interrupt: Callable[[], None]) -> Response:
        return JSONResponse(answer(counted(bare, given, engine, interrupt, request.pixel_bounds)))

    response = await prepared(context, answered)
    return await encode_images(context, insert, given) if response is None else response


async def tokenize(
    context: RequestContext, request: TokenizeRequest | TokenizePromptRequest | TokenizeChatRequest
) -> Response:
    """The ids of a text or a conversation. Raises ApiError 400."""
    service = context.service
    if isinstance(request, TokenizeChatRequest):
        strings = bool(request.return_token_strs)
        return await with_prompt(context, request, lambda ids: _counted(service, ids, strings=strings))
    await ensure_loaded(context)
    vocab = service.backend.engine.vocab

    def answer(interrupt: Callable[[], None]) -> dict[str, Any]:
        if isinstance(request, TokenizePromptRequest):
            ids = vocab.tokenize(request.prompt, special=True, check=bounded(interrupt, "prompt"))
            ids = _begun(vocab, ids) if request.add_special_tokens else ids
            return _counted(service, ids, strings=bool(request.return_token_strs))
        check = bounded(interrupt, "content")
        ids = vocab.tokenize(request.content, special=request.parse_special, check=check)
        ids = _begun(vocab, ids) if request.add_special else ids
        if request.with_pieces:
            return {"tokens": [{"id": token, "piece": _piece(vocab.spelling(token))} for token in ids]}
        return {"tokens": ids}

    return await prepared(context, lambda interrupt: JSONResponse(answer(interrupt)))


async def detokenize(context: RequestContext, request: DetokenizeRequest) -> Response:
    """The text of `tokens`, as llama-server's `content`, without control tokens, and vLLM's `prompt`, with
    them.

    Bytes that are not UTF-8 become U+FFFD. Raises ApiError 400.
    """
    if len(request.tokens) > MAX_TOKENS:
        raise bad_request("tokens", f"more than {MAX_TOKENS:,}; send them in parts")
    await ensure_loaded(context)
    vocab = context.service.backend.engine.vocab

    def answer(_: Callable[[], None]) -> Response:
        if wrong := [token for token in request.tokens if not 0 <= token < vocab.size]:
            raise bad_request("tokens", f"{wrong[0]} is not an id; they run from 0 to {vocab.size - 1}")
        kinds = {"content": vocab.token_bytes, "prompt": vocab.spelling}
        texts = {
            name: b"".join(map(spell, request.tokens)).decode("utf-8", "replace")
            for name, spell in kinds.items()
        }
        return JSONResponse(texts)

    return await prepared(context, answer)


async def apply_template(context: RequestContext, request: ChatRequest) -> Response:
    """The text of a conversation's prompt. A picture is the template's placeholder. Raises ApiError 400."""
    service = context.service
    await ensure_loaded(context, request.check_messages)
    engine = service.backend.engine
    vocab = engine.vocab

    def answer(interrupt: Callable[[], None]) -> Response:
        pictures: list[GivenPicture] | None = None if engine.encoder is None else []
        ids, _ = prompt_of(service, request, bounded(interrupt, "messages"), pictures)
        return JSONResponse({"prompt": b"".join(map(vocab.spelling, ids)).decode("utf-8", "replace")})

    return await prepared(context, answer)


async def render(
    context: RequestContext, request: ChatRequest | CompletionRequest | ResponsesRequest
) -> Response:
    """The token ids of a request's prompt, tools included, as vLLM's `.../render` returns them; a list of
    them for a completion with several prompts. Raises ApiError 400."""
    service = context.service
    asked = (
        await on_thread(request.chat, context.body.size) if isinstance(request, ResponsesRequest) else request
    )

    def rendered(ids: list[int]) -> dict[str, Any]:
        kept = truncated(ids, asked, service.backend.engine.context_size)
        return {"model": service.settings.model_id, "token_ids": kept}

    if isinstance(asked, ChatRequest):
        return await with_prompt(context, asked, rendered)
    await ensure_loaded(context)

    def answer(interrupt: Callable[[], None]) -> Response:
        raw, check = service.backend.prompter.raw, bounded(interrupt, "prompt")
        prompts = [raw(given, check) if isinstance(given, str) else given for given in asked.prompt]
        return JSONResponse(list(map(rendered, prompts)))

    return await prepared(context, answer)


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Special tokens by their texts, and the chat template, in vLLM's format, which lm-eval reads."""
    backend = service.backend
    vocab, metadata = backend.engine.vocab, backend.engine.metadata

    def text(token: str | int | None) -> str | None:
        return None if token is None else vocab.spelling(int(token)).decode("utf-8", "replace")

    return {
        "tokenizer_class": metadata.get("tokenizer.ggml.model"),
        "bos_token": text(vocab.bos_id),
        "eos_token": text(vocab.eos_id),
        "pad_token": text(metadata.get("tokenizer.ggml.padding_token_id")),
        "model_max_length": backend.engine.context_size,
        "chat_template": backend.prompter.template,
    }


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
    """A token as llama-server shows it: bytes if it is a part of a character."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return list(spelling)
