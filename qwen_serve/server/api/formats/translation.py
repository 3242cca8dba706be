"""Translates other API formats to a chat request, so that the same code answers all of them."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, PrivateAttr, ValidationError, model_validator

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import ApiError, bad_request, from_exception, from_validation
from qwen_serve.server.api.fields.unsupported import UNSUPPORTED, Refusing
from qwen_serve.server.api.formats.chat import ChatRequest, begin
from qwen_serve.server.api.serving import ServedRequest
from qwen_serve.server.chat import PromptError, Reply
from qwen_serve.server.chat.errors import object_in
from qwen_serve.server.chat.pictures import GivenPicture

FOREIGN: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "n_predict": (-1,),
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "n_probs": (0,),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "response_format": ({"type": "text"},),
    "reasoning_effort": (),
    "reasoning_format": ("auto", "deepseek"),
    "separate_reasoning": (True,),
    "parallel_tool_calls": (True,),
    "cache_report": (False,),
    "timings_per_token": (False,),
    "return_progress": (False,),
}
"""Fields of a chat request that other formats refuse, because they have another form of them or none. Field
-> its values without effect, besides null."""

SHARED = (ChatRequest.model_fields.keys() | UNSUPPORTED.keys()) - FOREIGN.keys() - {"stream_options"}
"""Fields with the same meaning in a chat request and in other formats, whose clients send them too. Most are
vLLM's. (Usage is always sent.)"""


class Sharing(Refusing):
    """A body in another format. Besides its own fields, it may have those of a chat request."""

    _shared: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_shared(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(body)
        own = cls.model_fields.keys() | cls.unsupported.keys()
        made._shared = {name: value for name, value in body.items() if name in SHARED and name not in own}
        return made


def to_chat(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """The chat request with these fields; null counts as absent.

    `names` maps fields to the client's names for them, which errors use. Raises ApiError 400.
    """
    try:
        return ChatRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        wrong = from_validation(error)
    except ApiError as error:
        wrong = error
    raise renamed(wrong, names)


async def begun(
    context: RequestContext, asked: ChatRequest, prefix: str, names: Mapping[str, str]
) -> tuple[ServedRequest, Reply]:
    """Submits a translated request, which has one answer. Raises ApiError 400 under the client's names."""
    try:
        served, [reply] = await begin(context, asked, prefix)
    except (ApiError, PromptError) as error:
        raise renamed(from_exception(error), names) from error
    return served, reply


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """An error about a chat request, under the client's name for the field or for what contains it."""
    given = field = error.param or ""
    while field and field not in names:
        field = field.rpartition(".")[0]
    if not field:
        return error
    param = names[field] + given.removeprefix(field)
    message = error.message.replace(field, names[field], 1)
    return ApiError(error.status, message, param=param, code=error.code, headers=error.headers)


def blocks_in(value: Any, where: str, text_type: str = "text") -> list[tuple[str, Mapping[str, Any]]]:
    """Content as a list of blocks, each with its path; a string is one block of `text_type`."""
    if isinstance(value, str):
        return [(where, {"type": text_type, "text": value})]
    if not isinstance(value, list):
        raise bad_request(where, "must be a string or a list of content blocks")
    return [(f"{where}[{index}]", object_in(block, f"{where}[{index}]")) for index, block in enumerate(value)]


def spoken(parts: list[str | GivenPicture]) -> str | list[Any]:
    """A tool result's content: its texts, one a line; parts if there are pictures among them."""
    if not any(isinstance(part, GivenPicture) for part in parts):
        return "\n".join(part for part in parts if isinstance(part, str))
    made: list[Any] = []
    for part in parts:
        if isinstance(part, GivenPicture):
            made.append(part)
        elif made and isinstance(made[-1], dict):
            made[-1]["text"] += f"\n{part}"
        else:
            made.append({"type": "text", "text": part})
    return made
