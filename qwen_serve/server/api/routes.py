"""Every endpoint: the body it takes and the function that answers it."""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from qwen_serve.server.about import own_version
from qwen_serve.server.api import tokens
from qwen_serve.server.api.context import RequestContext, context_of
from qwen_serve.server.api.errors import ApiError, bad_request
from qwen_serve.server.api.fields.sampling import llama_settings
from qwen_serve.server.api.formats.chat import ChatRequest, chat
from qwen_serve.server.api.formats.completions import CompletionRequest, complete
from qwen_serve.server.api.formats.llama_completion import LlamaCompletionRequest, llama_complete
from qwen_serve.server.api.formats.messages import CountTokensRequest, MessagesRequest, count_tokens, messages
from qwen_serve.server.api.formats.ollama import (
    OLLAMA_VERSION,
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
    model_details,
    model_tags,
    ollama_chat,
    ollama_generate,
    running_models,
    show,
)
from qwen_serve.server.api.formats.responses import ResponsesRequest, respond
from qwen_serve.server.api.limits import stopped
from qwen_serve.server.api.openapi import (
    AnthropicErrorAnswer,
    ErrorAnswer,
    OllamaErrorAnswer,
    documented,
    errors,
)
from qwen_serve.server.api.request import ensure_loaded, read_request
from qwen_serve.server.api.service import Service, service_of
from qwen_serve.server.api.slots import SlotActionRequest, slot_action, slots
from qwen_serve.server.chat.pictures import MAX_IMAGES
from qwen_serve.server.engine import EngineDead


class AnswerRoute(APIRoute):
    """Calls an endpoint that takes the request and returns a response, without FastAPI's dependency
    handling."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


answers = APIRouter(route_class=AnswerRoute)
others = APIRouter()

ROUTERS = (answers, others)
"""They are searched in this order; the most used endpoints come first."""


LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
DEFAULT_LIMIT = 16
"""`max_tokens` of a completion that sets none of these fields, as in OpenAI's API and vLLM."""


def endpoints() -> list[APIRoute]:
    """Every route of ROUTERS."""
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


# --- answers to a body --------------------------------------------------------------------------------------


def _post(
    paths: str,
    answer: Callable[[RequestContext, Any], Awaitable[Response]],
    *bodies: type[BaseModel],
    choose: Callable[[dict[str, Any]], type[BaseModel]] | None = None,
    error: type[BaseModel] = ErrorAnswer,
) -> None:
    """Registers `answer` at each of `paths`. `choose` returns the one of `bodies` that fits a request's body.

    The OpenAPI description shows the first path only.
    """

    async def endpoint(http: Request) -> Response:
        context = context_of(http.scope)
        try:
            return await answer(context, await read_request(context, choose or (lambda _: bodies[0])))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if context.service.is_cut and task is not None:
                task.uncancel()
                raise stopped() from None
            raise
        except EngineDead:  # for a request that waits for its grammar
            if context.service.is_cut:
                raise stopped() from None
            raise
        finally:
            context.body.release()

    for number, path in enumerate(paths.split()):
        answers.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            name=answer.__name__,
            description=inspect.getdoc(answer),
            openapi_extra={**documented(*bodies, error=error), "parameters": _in_path(path)},
            include_in_schema=number == 0,
        )


def _in_path(path: str) -> list[dict[str, Any]]:
    """A path's parameters, for OpenAPI."""
    names = re.findall(r"{(\w+)}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def invoke(context: RequestContext, request: CompletionRequest | ChatRequest) -> Awaitable[Response]:
    """Continues a `prompt` or answers `messages`; the temperature is 0 unless given."""
    return complete(context, request) if isinstance(request, CompletionRequest) else chat(context, request)


def completed(body: dict[str, Any]) -> type[CompletionRequest]:
    """A completion; `DEFAULT_LIMIT` tokens unless the body sets a limit."""
    if all(body.get(name) is None for name in LIMITS):
        body["max_tokens"] = DEFAULT_LIMIT
    return CompletionRequest


def invoked(body: dict[str, Any]) -> type[CompletionRequest | ChatRequest]:
    """The schema of a body, a completion's or a chat's; sets the default temperature. Raises ApiError 400."""
    prompted, conversed = body.get("prompt") is not None, body.get("messages") is not None
    if prompted == conversed:
        param = "messages" if prompted else "prompt"
        raise bad_request(param, "give either prompt or messages" + ", not both" * prompted)
    if body.get("temperature") is None:
        body["temperature"] = 0.0
    return CompletionRequest if prompted else ChatRequest


_post("/v1/completions", complete, CompletionRequest, choose=completed)
_post("/slots/{slot}", slot_action, SlotActionRequest)
_post("/completion /completions", llama_complete, LlamaCompletionRequest)
_post("/v1/chat/completions /chat/completions", chat, ChatRequest)
_post("/v1/responses /responses", respond, ResponsesRequest)
_post("/v1/messages", messages, MessagesRequest, error=AnthropicErrorAnswer)
_post("/v1/messages/count_tokens", count_tokens, CountTokensRequest, error=AnthropicErrorAnswer)
_post("/api/chat", ollama_chat, OllamaChatRequest, error=OllamaErrorAnswer)
_post("/api/generate", ollama_generate, OllamaGenerateRequest, error=OllamaErrorAnswer)
_post("/api/show", show, ShowRequest, error=OllamaErrorAnswer)
_post("/invocations", invoke, CompletionRequest, ChatRequest, choose=invoked)

TOKENIZED = (tokens.TokenizeRequest, tokens.TokenizePromptRequest, tokens.TokenizeChatRequest)
_post("/tokenize", tokens.tokenize, *TOKENIZED, choose=tokens.asked)
_post("/detokenize", tokens.detokenize, tokens.DetokenizeRequest)
_post("/apply-template", tokens.apply_template, ChatRequest)
_post("/v1/chat/completions/render", tokens.render, ChatRequest)
_post("/v1/completions/render", tokens.render, CompletionRequest, choose=completed)
_post("/v1/responses/render", tokens.render, ResponsesRequest)


@others.get("/tokenizer_info")
async def about_tokenizer(http: Request) -> dict[str, Any]:
    """Special tokens and chat template."""
    await ensure_loaded(context_of(http.scope))
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
    """200 once the model is loaded and warmed up, also while it sleeps; 503 before that, while draining and
    after a failure."""
    status = service_of(http).status
    said = "ok" if status == "ready" else status  # llama-server's word
    return JSONResponse({"status": said}, status_code=200 if status in ("ready", "sleeping") else 503)


@others.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(http: Request) -> Response:
    """Prometheus' text format: counters since the start; gauges as of now."""
    service = service_of(http)
    stats = service.loaded.engine.stats() if service.loaded else None
    return Response(service.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)


@others.get("/version")
async def version(http: Request) -> dict[str, str]:
    """The server's version, in vLLM's format."""
    return {"version": http.app.version}


@others.get("/props")
async def props(http: Request) -> dict[str, Any]:
    """llama-server's properties: the context of a slot, slots, chat template, defaults."""
    service = service_of(http)
    return {**service.tell(llama_props), "is_sleeping": service.status == "sleeping"}


def llama_props(service: Service) -> dict[str, Any]:
    """`props` without whether the model sleeps."""
    backend = service.backend
    engine = backend.engine
    bos = engine.vocab.bos_id
    params, thinking = (llama_settings(backend.defaults.of(mode)) for mode in ("instruct", "thinking"))
    return {
        "default_generation_settings": {
            "n_ctx": engine.context_size,
            "params": params,
            "thinking_params": thinking,
        },
        "total_slots": engine.settings.parallel,
        "model_alias": service.settings.model_id,
        "model_path": str(service.settings.model),
        "modalities": {"vision": engine.encoder is not None, "audio": False},
        "limits": {"body_bytes": service.settings.max_body_mib * 2**20, "images": MAX_IMAGES},
        "mcp_origins": service.settings.mcp_servers(),
        "chat_template": backend.prompter.template,
        "bos_token": "" if bos is None else engine.vocab.spelling(bos).decode("utf-8", "replace"),
        "eos_token": engine.vocab.spelling(engine.vocab.eos_id).decode("utf-8", "replace"),
        "build_info": f"qwen-serve {own_version()}",
        "endpoint_metrics": True,
        "endpoint_props": False,
        "endpoint_slots": True,
    }


@others.get("/slots", responses=errors(401, 403, 503))
async def about_slots(http: Request, fail_on_no_slot: str = "") -> list[dict[str, Any]]:
    """What each slot does, as llama-server reports it; with `fail_on_no_slot` 503 if none is idle."""
    await ensure_loaded(context_of(http.scope))
    return slots(service_of(http).backend.engine, fail_without=bool(fail_on_no_slot))


@others.get("/api/tags", responses=errors(401, 403, 503, answer=OllamaErrorAnswer))
async def tags(http: Request) -> dict[str, Any]:
    """The server's one model, in Ollama's format."""
    return service_of(http).tell(model_tags)


@others.get("/api/ps", responses=errors(401, 403, 503, answer=OllamaErrorAnswer))
async def running(http: Request) -> dict[str, Any]:
    """The loaded model, in Ollama's format."""
    return running_models(service_of(http))


@others.get("/api/version", responses=errors(401, 403, answer=OllamaErrorAnswer))
async def ollama_version() -> dict[str, str]:
    """The Ollama version whose API this server implements."""
    return {"version": OLLAMA_VERSION}


@others.get("/models", include_in_schema=False)
@others.get("/v1/models", responses=errors(401, 403, 503))
async def models(http: Request) -> dict[str, Any]:
    """The model and its LoRA adapters."""
    service = service_of(http)
    adapters = (adapter_card(service, name) for name in service.settings.adapters)
    return {"object": "list", "data": [service.tell(model_card), *adapters]}


@others.get("/v1/models/{model:path}", responses=errors(401, 403, 404, 503))
async def model(http: Request, model: str) -> dict[str, Any]:
    """The card of the model called `model`, or of its adapter; 404 for any other name."""
    service = service_of(http)
    if model in service.settings.adapters:
        return adapter_card(service, model)
    if model != service.settings.model_id:
        message = f"there is no model {model!r}; this server has {service.settings.model_id!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return service.tell(model_card)


@others.get("/lora-adapters", responses=errors(401, 403))
async def lora_adapters(http: Request) -> list[dict[str, Any]]:
    """The adapters and their numbers for `lora`, in llama-server's format. A request applies only those that
    it asks for."""
    adapters = service_of(http).settings.adapters.items()
    return [
        {"id": number, "path": str(path), "scale": 0.0, "name": name}
        for number, (name, path) in enumerate(adapters)
    ]


def adapter_card(service: Service, name: str) -> dict[str, Any]:
    """A LoRA adapter as vLLM lists it: a model with its file and its base model."""
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "qwen-serve",
        "root": str(service.settings.adapters[name]),
        "parent": service.settings.model_id,
    }


def model_card(service: Service) -> dict[str, Any]:
    """The model as OpenAI lists it, with vLLM's name for its context and llama-server's `meta`."""
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


KNOWN = (llama_props, model_card, model_tags, model_details)
"""Functions whose results stay available while the model sleeps."""

for read in endpoints():
    if "GET" in (read.methods or ()):  # FastAPI, unlike Starlette, adds no HEAD; the server omits the body
        others.add_api_route(read.path, read.endpoint, methods=["HEAD"], include_in_schema=False)
