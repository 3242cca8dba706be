"""Fields for structured output: OpenAI's, llama-server's and vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qwen_serve.server.api.errors import bad_request
from qwen_serve.server.chat.formats import (
    WHITE_SPACE,
    AnswerFormat,
    choice_format,
    compose,
    grammar_format,
    json_format,
    regex_format,
)
from qwen_serve.server.chat.schemas import closed, json_value
from qwen_serve.server.chat.structural_tags import structural_tag_format
from qwen_serve.server.chat.tool_formats import ToolFormat, tool_format

VLLM_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _response_format(value: Any) -> Any:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema", "structural_tag"):
        types = '{"type": "json_object"}, {"type": "json_schema", ...}, {"type": "structural_tag", ...}'
        raise ValueError(f'must be {{"type": "text"}} or one of {types}')
    if kind == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(
            inner.get("schema", value.get("schema")), dict | bool
        ):
            raise ValueError('json_schema needs {"name": ..., "schema": {...}}')
    return value


def _structured_outputs(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    given = {key: one for key, one in value.items() if one is not None and one is not False}
    how = {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"}
    known = {*VLLM_KINDS, *how, "backend", "_backend"}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"{unknown[0]} is not supported; one of {', '.join(VLLM_KINDS)} is")
    kinds = [key for key in VLLM_KINDS if key in given]
    if len(kinds) != 1:
        raise ValueError(f"needs one of {', '.join(VLLM_KINDS)}, and has {', '.join(kinds) or 'none'}")
    if not isinstance(given.get("whitespace_pattern", ""), str):
        raise ValueError("whitespace_pattern must be a string")
    return given


def _structural_tag(value: Any) -> Any:
    if not isinstance(value, dict | str | None):
        raise ValueError('must be {"type": "structural_tag", "format": {...}}')
    return value


FORMATS: dict[str, Callable[[Any, str], AnswerFormat]] = {
    "json_schema": json_format,
    "grammar": grammar_format,
    "guided_regex": regex_format,
    "guided_choice": choice_format,
    "guided_grammar": grammar_format,
    "regex": regex_format,
    "ebnf": grammar_format,
}
"""Fields that describe a complete format: llama-server's, vLLM's, SGLang's."""

NOTHING: dict[str, tuple[Any, ...]] = {"json_schema": ({}, ""), "grammar": ("",)}
"""Values of these fields that have no effect, besides null."""


class StructuredFields(BaseModel):
    """Structured output of every generating endpoint. Several fields must ask for the same format."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    response_format: Annotated[dict[str, Any] | None, BeforeValidator(_response_format)] = None
    json_schema: dict[str, Any] | bool | str | None = None
    grammar: str | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: Annotated[dict[str, Any] | None, BeforeValidator(_structured_outputs)] = None
    structural_tag: Annotated[dict[str, Any] | str | None, BeforeValidator(_structural_tag)] = None

    def answer_format(self, special: Sequence[str]) -> AnswerFormat | None:
        """The required format of the answer; None if no field asks for one. `special` are the vocabulary's
        added tokens as text. Raises PromptError and ApiError 400."""
        space = self.guided_whitespace_pattern or WHITE_SPACE
        wanted: list[tuple[str, Callable[[str], AnswerFormat]]] = []
        if self.response_format is not None and self.response_format["type"] != "text":
            wanted.append(
                ("response_format", lambda _: _of_response_format(self.response_format or {}, special))
            )
        if self.guided_json is not None:
            wanted.append(
                ("guided_json", lambda param: json_format(self.guided_json, param, white_space=space))
            )
        for param, make in FORMATS.items():
            value = getattr(self, param)
            if value not in (None, *NOTHING.get(param, ())):
                wanted.append((param, partial(make, value)))
        if self.structured_outputs is not None:
            wanted.append(("structured_outputs", lambda _: _of_vllm(self.structured_outputs or {}, special)))
        if self.structural_tag is not None:
            wanted.append(
                ("structural_tag", lambda param: structural_tag_format(self.structural_tag, param, special))
            )
        if self.guided_whitespace_pattern is not None and "guided_json" not in dict(wanted):
            raise bad_request("guided_whitespace_pattern", "goes with guided_json only")
        formats = [make(param) for param, make in wanted]
        for (param, _), other in zip(wanted[1:], formats[1:], strict=True):
            if not other.same_as(formats[0]):  # some clients send one format in the fields of several servers
                raise bad_request(param, f"contradicts {wanted[0][0]}; give one of them")
        return formats[0] if formats else None


def _of_response_format(value: dict[str, Any], special: Sequence[str]) -> AnswerFormat:
    if value["type"] == "structural_tag":
        return structural_tag_format(value, "response_format", special)
    if value["type"] == "json_schema":
        inner = value["json_schema"]
        if "schema" in inner:
            return json_format(inner["schema"], "response_format.json_schema.schema")
        return json_format(value["schema"], "response_format.schema")
    return json_format(value.get("schema") or {"type": "object"}, "response_format.schema")


def _of_vllm(value: dict[str, Any], special: Sequence[str]) -> AnswerFormat:
    space = value.get("whitespace_pattern", WHITE_SPACE)
    flexible = not value.get("disable_any_whitespace")
    for kind in VLLM_KINDS:
        if kind not in value:
            continue
        param, one = f"structured_outputs.{kind}", value[kind]
        if kind in ("json", "json_object"):
            schema = {"type": "object"} if kind == "json_object" else one
            if value.get("disable_additional_properties"):
                schema = closed(json_value(schema, param) if isinstance(schema, str) else schema)
            return json_format(schema, param, white_space=space, flexible=flexible)
        if kind == "structural_tag":
            return structural_tag_format(one, param, special)
        if kind == "choice":
            if not isinstance(one, list):
                raise bad_request(param, "must be a list of texts")
            return choice_format(one, param)
        if not isinstance(one, str):
            raise bad_request(param, "must be a string")
        return regex_format(one, param) if kind == "regex" else grammar_format(one, param)
    raise AssertionError("validated before")


# --- tool_choice -------------------------------------------------------------------------------------------


def check_tool_choice(value: Any) -> Any:
    """Checks `tool_choice`: a word, an object naming a function, or OpenAI's allowed_tools."""
    if value in (None, "none", "auto", "required", "any"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("none", "auto", "required", "any"):
        return kind
    if kind in ("function", "tool"):
        named = value.get("function") if isinstance(value.get("function"), dict) else value
        if isinstance(named, dict) and isinstance(named.get("name"), str):
            return {"type": "function", "function": {"name": named["name"]}}
    if kind == "allowed_tools":
        inner = value.get("allowed_tools", value)
        tools = inner.get("tools") if isinstance(inner, dict) else None
        names = [_name_of(tool) for tool in tools] if isinstance(tools, list) else []
        if names and all(names) and inner.get("mode") in ("auto", "required"):
            return {"type": "allowed_tools", "mode": inner["mode"], "names": names}
    raise ValueError(
        '"none", "auto", "required" or "any", or {"type": "function", "function": {"name": ...}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}} is what it may be'
    )


def _name_of(tool: Any) -> str | None:
    if not isinstance(tool, dict):
        return None
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _forces(choice: Any) -> bool:
    """Whether `tool_choice` asks for a call."""
    if isinstance(choice, dict):
        return bool(choice["type"] == "function" or choice["mode"] == "required")
    return choice in ("required", "any")


def _named(choice: Any) -> list[str] | None:
    """The names of the tools that `tool_choice` allows; None if it allows all."""
    if not isinstance(choice, dict):
        return None
    return [choice["function"]["name"]] if choice["type"] == "function" else choice["names"]


def forced_tools(choice: Any, tools: Sequence[dict[str, Any]] | None) -> list[str]:
    """The names of the tools one of which must be called; none if `tool_choice` forces no call."""
    if not _forces(choice):
        return []
    named = _named(choice)
    return [name for tool in tools or [] if (name := _name_of(tool))] if named is None else named


def calls_format(
    choice: Any, tools: Sequence[dict[str, Any]] | None, *, parallel: bool, beside: AnswerFormat | None
) -> ToolFormat | None:
    """The required format of tool calls; None if the request asks for none. Raises PromptError, ApiError
    400."""
    forced, names = _forces(choice), _named(choice)
    offered = list(tools or [])
    if names is not None:
        there = {_name_of(tool) for tool in offered}
        if unknown := [name for name in names if name not in there]:
            raise bad_request("tool_choice", f"names {unknown[0]!r}, which tools does not have")
        chosen = set(names)
        offered = [tool for tool in offered if _name_of(tool) in chosen]
    if forced and not offered:
        raise bad_request("tool_choice", "asks for a call, but there are no tools")
    if not offered:
        return None
    strict = any(isinstance(t.get("function"), dict) and t["function"].get("strict") is True for t in offered)
    if not (forced or strict or names is not None or (beside is not None and not beside.calls)):
        return None
    if beside is not None and not forced and not beside.is_json:
        raise bad_request(beside.param, "contradicts tools that the model may call")
    param = "tool_choice" if forced else "tools"
    return tool_format(offered, forced=forced, parallel=parallel, beside=beside, param=param)


# --- from fields to grammars -------------------------------------------------------------------------------


@dataclass(frozen=True)
class WantedGrammar:
    """The grammar of a whole answer, for llguidance, and the request's field that asks for it."""

    text: str
    param: str
    loosened: Callable[[str], WantedGrammar | None] = lambda _: None
    """The grammar without a schema that llguidance refused with this error, if it need not be enforced.
    Raises PromptError naming one that must be."""


def wanted_grammar(format_: AnswerFormat | ToolFormat | None, *, thinking: bool) -> WantedGrammar | None:
    """The grammar of a whole answer. Raises PromptError if it is too long."""
    if format_ is None:
        return None
    text = compose(format_, thinking=thinking)
    if not isinstance(format_, ToolFormat):
        return WantedGrammar(text, format_.param)

    def loosened(error: str) -> WantedGrammar | None:
        return wanted_grammar(format_.loosened(error), thinking=thinking)

    return WantedGrammar(text, format_.param, loosened)
