"""Every endpoint: what it takes and who answers it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST

from qwen_serve.server.api import tokens
from qwen_serve.server.api.errors import ApiError, bad_request
from qwen_serve.server.api.formats.chat import ChatRequest, chat
from qwen_serve.server.api.formats.completions import CompletionRequest, complete
from qwen_serve.server.api.formats.messages import CountTokensRequest, MessagesRequest, count_tokens, messages
from qwen_serve.server.api.formats.responses import ResponsesRequest, respond
from qwen_serve.server.api.limits import stopped
from qwen_serve.server.api.openapi import AnthropicErrorAnswer, documented, errors
from qwen_serve.server.api.request import request_of
from qwen_serve.server.api.service import Service, service_of
from qwen_serve.server.api.tokens import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizePromptRequest,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from qwen_serve.server.api.fields.generation import GenerationRequest


class PlainRoute(APIRoute):
    """For endpoints that take the request and return a response: FastAPI has nothing to find out for them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself, and the end of its body."""
        endpoint = self.endpoint

        async def answer(http: Request) -> Response:
            http.state.body = body = service_of(http).bodies.begin()
            try:
                response: Response = await endpoint(http)
                return response
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if service_of(http).is_cut and task is not None:
                    task.uncancel()
                    raise stopped() from None
                raise
            finally:
                body.release()

        return answer


plain = APIRouter(route_class=PlainRoute)
others = APIRouter()

ROUTERS = (plain, others)
"""Looked through in this order: what is asked for most comes first."""


LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
DEFAULT_LIMIT = 16
"""Tokens of a completion where a request gives none of these, as in OpenAI's API and vLLM."""


def endpoints() -> list[APIRoute]:
    """Every route of theirs."""
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


# --- generation --------------------------------------------------------------------------------------------


@plain.post("/v1/completions", openapi_extra=documented(CompletionRequest))
async def completions(http: Request) -> Response:
    """Continue a prompt: no template, no thinking."""
    service = service_of(http)
    request, size = await request_of(http, completed)
    return await complete(http, service, request, size)


@plain.post("/chat/completions", include_in_schema=False)
@plain.post("/v1/chat/completions", openapi_extra=documented(ChatRequest))
async def chat_completions(http: Request) -> Response:
    """Answer a conversation."""
    service = service_of(http)
    request, size = await request_of(http, lambda _: ChatRequest)
    return await chat(http, service, request, size)


@plain.post("/responses", include_in_schema=False)
@plain.post("/v1/responses", openapi_extra=documented(ResponsesRequest))
async def responses(http: Request) -> Response:
    """Answer a conversation, as OpenAI's Responses API does; nothing is kept."""
    request, size = await request_of(http, lambda _: ResponsesRequest)
    return await respond(http, service_of(http), request, size)


@plain.post("/v1/messages", openapi_extra=documented(MessagesRequest, error=AnthropicErrorAnswer))
async def anthropic_messages(http: Request) -> Response:
    """Answer a conversation, as Anthropic's Messages API does."""
    request, size = await request_of(http, lambda _: MessagesRequest)
    return await messages(http, service_of(http), request, size)


@plain.post(
    "/v1/messages/count_tokens", openapi_extra=documented(CountTokensRequest, error=AnthropicErrorAnswer)
)
async def anthropic_count_tokens(http: Request) -> Response:
    """How many tokens a conversation's prompt has."""
    request, size = await request_of(http, lambda _: CountTokensRequest)
    return await count_tokens(http, service_of(http), request, size)


@plain.post("/invocations", openapi_extra=documented(CompletionRequest, ChatRequest))
async def invocations(http: Request) -> Response:
    """A `prompt` is continued, `messages` are answered; the temperature is 0 where none is given."""
    service = service_of(http)
    request, size = await request_of(http, invoked)
    if isinstance(request, CompletionRequest):
        return await complete(http, service, request, size)
    assert isinstance(request, ChatRequest)
    return await chat(http, service, request, size)


def completed(body: dict[str, Any]) -> type[CompletionRequest]:
    """A completion, of `DEFAULT_LIMIT` tokens where nothing is said."""
    if all(body.get(name) is None for name in LIMITS):
        body["max_tokens"] = DEFAULT_LIMIT
    return CompletionRequest


def invoked(body: dict[str, Any]) -> type[GenerationRequest]:
    """Which of the two a body asks for; gives it a temperature. Raises ApiError 400."""
    prompted, conversed = body.get("prompt") is not None, body.get("messages") is not None
    if prompted == conversed:
        param = "messages" if prompted else "prompt"
        raise bad_request("give either prompt or messages" + ", not both" * prompted, param, "invalid_value")
    if body.get("temperature") is None:
        body["temperature"] = 0.0
    return CompletionRequest if prompted else ChatRequest


# --- tokens: the loaded model's own vocabulary, for clients that count -------------------------------------


@plain.post(
    "/tokenize", openapi_extra=documented(TokenizeRequest, TokenizePromptRequest, TokenizeChatRequest)
)
async def tokenize(http: Request) -> Response:
    """The ids of `content` (llama-server), `prompt` or `messages` (vLLM)."""
    return await tokens.tokenize(http, *await request_of(http, tokens.asked))


@plain.post("/detokenize", openapi_extra=documented(DetokenizeRequest))
async def detokenize(http: Request) -> Response:
    """The text of `tokens`: without control tokens as `content`, with them as `prompt`."""
    return await tokens.detokenize(http, *await request_of(http, lambda _: DetokenizeRequest))


@plain.post("/apply-template", openapi_extra=documented(ChatRequest))
async def apply_template(http: Request) -> Response:
    """The prompt that a conversation would be answered with, as text."""
    return await tokens.apply_template(http, *await request_of(http, lambda _: ChatRequest))


@plain.post("/v1/chat/completions/render", openapi_extra=documented(ChatRequest))
async def render_chat(http: Request) -> Response:
    """The ids of the prompt that a conversation would be answered with."""
    return await tokens.render(http, *await request_of(http, lambda _: ChatRequest))


@plain.post("/v1/completions/render", openapi_extra=documented(CompletionRequest))
async def render_completion(http: Request) -> Response:
    """The ids of each prompt that would be continued."""
    return await tokens.render(http, *await request_of(http, completed))


@plain.post("/v1/responses/render", openapi_extra=documented(ResponsesRequest))
async def render_response(http: Request) -> Response:
    """The ids of the prompt that a response would answer."""
    return await tokens.render(http, *await request_of(http, lambda _: ResponsesRequest))


@others.get("/tokenizer_info")
async def about_tokenizer(http: Request) -> dict[str, Any]:
    """Special tokens and chat template."""
    return tokens.tokenizer_info(service_of(http))


STATUS: dict[int | str, dict[str, Any]] = {
    503: {
        "description": "Loading, draining or failed",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}

# --- the server --------------------------------------------------------------------------------------------


@others.get("/ping", responses=STATUS)
@others.get("/health", responses=STATUS)
async def ping(http: Request) -> JSONResponse:
    """200 once the model is loaded and warmed up; 503 before that, while draining and after a failure."""
    status = service_of(http).status
    return JSONResponse({"status": status}, status_code=200 if status == "ready" else 503)


@others.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(http: Request) -> Response:
    """Prometheus' text format: counters since the start; gauges as of now."""
    service = service_of(http)
    stats = service.loaded.engine.stats() if service.loaded else None
    return Response(service.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)


@others.get("/version")
async def version(http: Request) -> dict[str, str]:
    """The server's version, as vLLM tells it."""
    return {"version": http.app.version}


@others.get("/props")
async def props(http: Request) -> dict[str, Any]:
    """What llama-server tells of itself: the context of a slot, slots, chat template, defaults."""
    service = service_of(http)
    backend = service.backend
    engine = backend.engine
    bos = engine.vocab.bos_id
    defaults = backend.defaults.of("instruct")
    params = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
        "presence_penalty": defaults.presence_penalty,
        "frequency_penalty": defaults.frequency_penalty,
    }
    return {
        "default_generation_settings": {"n_ctx": engine.context_size, "params": params},
        "total_slots": engine.settings.parallel,
        "model_alias": service.settings.model_id,
        "model_path": str(service.settings.model),
        "modalities": {"vision": False, "audio": False},
        "chat_template": backend.prompter.template,
        "bos_token": "" if bos is None else engine.vocab.spelling(bos).decode("utf-8", "replace"),
        "eos_token": engine.vocab.spelling(engine.vocab.eos_id).decode("utf-8", "replace"),
        "build_info": f"qwen-serve {http.app.version}",
        "endpoint_metrics": True,
        "endpoint_props": False,
        "endpoint_slots": False,
    }


@others.get("/models", include_in_schema=False)
@others.get("/v1/models", responses=errors(401, 403, 503))
async def models(http: Request) -> dict[str, Any]:
    """A list of one: the one model there is."""
    return {"object": "list", "data": [model_card(service_of(http))]}


@others.get("/v1/models/{model:path}", responses=errors(401, 403, 404, 503))
async def model(http: Request, model: str) -> dict[str, Any]:
    """The card of the model called `model`; 404 for any other name."""
    service = service_of(http)
    if model != service.settings.model_id:
        message = f"there is no model {model!r}; this server has {service.settings.model_id!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return model_card(service)


def model_card(service: Service) -> dict[str, Any]:
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


for read in endpoints():
    if "GET" in (
        read.methods or ()
    ):  # FastAPI, unlike Starlette, gives it no HEAD; the server leaves its body out
        others.add_api_route(read.path, read.endpoint, methods=["HEAD"], include_in_schema=False)
