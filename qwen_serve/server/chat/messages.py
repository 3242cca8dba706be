"""Checks OpenAI's message and tool objects and converts them for chat templates."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from .documents import text_of_file
from .errors import PromptError, kind_of, list_in, object_in, text_in
from .pictures import MAX_IMAGES, GivenPicture
from .values import read_object

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NEEDS_CONTENT = ("system", "user")
_SHOW = ("user", "tool")
"""Roles whose content may have pictures."""

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a text part -> the key of its text. Types that OpenAI's APIs return are accepted, too, as in
vLLM."""


def check_messages(messages: object, pictures: list[GivenPicture] | None = None) -> list[dict[str, Any]]:
    """Return the messages as new dicts, in which roles are known, contents are text, and tool-call arguments
    are objects. Arguments that are no object, as those of a call that a limit cut off, become a parameter of
    the name `arguments`, unless their beginning can be read.

    `developer` becomes `system`, `reasoning` becomes `reasoning_content`, and JSON strings in `arguments` are
    parsed. All system messages are joined into one at the beginning, with a blank line between them, because
    Qwen's template allows them nowhere else. Tool results stand in the order of their calls, because the
    template leaves out the ids. Unknown keys stay, for templates that read them. Pictures are appended to
    `pictures` in order; it is None for a model without vision. Raises PromptError naming the field that is
    wrong.
    """
    given = list_in(messages, "messages")
    if not given:
        raise PromptError("messages", "is empty; at least one user message is needed")
    order = _in_order_of_calls(given)
    checked = [_message(given[index], f"messages[{index}]", pictures) for index in order]
    if pictures is not None and len(pictures) > MAX_IMAGES:
        raise pictures[MAX_IMAGES].wrong(
            f"is picture {MAX_IMAGES + 1} of {len(pictures)}; at most {MAX_IMAGES} are read"
        )
    return _one_system(checked)


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return the tools as dicts, or None when there are none. Raises PromptError."""
    if tools is None:
        return None
    given = list_in(tools, "tools")
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        function = object_in(object_in(tool, where).get("function"), f"{where}.function")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise PromptError(f"{where}.function.name", "must be a non-empty string")
        name, parameters = function["name"], function.get("parameters")
        if name != name.strip() or set(name) & set("<>\n"):  # a call of it could not be read
            where += ".function.name"
            raise PromptError(where, f"is {name!r}; no <, >, line break or outer space may be in it")
        if parameters is not None:
            object_in(parameters, f"{where}.function.parameters")
    return [dict(tool) for tool in given] or None


def separate_reasoning(text: str) -> tuple[str, str] | None:
    """Split an assistant's text into (reasoning, answer); None if it has no `</think>`.

    As in Qwen's template, text between the last `<think>` and the first `</think>` is reasoning, text after
    the last `</think>` is the answer, and blank lines around the tags belong to neither.
    """
    pieces = text.strip().split("</think>")
    if len(pieces) == 1:
        return None
    return pieces[0].rstrip("\n").split("<think>")[-1].lstrip("\n"), pieces[-1].lstrip("\n")


def begun_reply(message: Mapping[str, Any]) -> tuple[str, str, bool]:
    """The reasoning and the answer of a checked assistant message that is to be continued, and whether it
    has closed its think block.

    An answer closes it, and so does a `</think>` in the content, where the reasoning may also be.
    """
    text = plain_text(message["content"])
    if "reasoning_content" in message:
        return message["reasoning_content"], text, bool(text)
    parts = separate_reasoning(text)
    if parts is not None:
        return *parts, True
    if text.lstrip().startswith("<think>"):
        return text.lstrip().removeprefix("<think>"), "", False
    return "", text, bool(text)


def plain_text(content: str | list[dict[str, Any]] | None) -> str:
    """A checked message's content as one string."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content)


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with at most one system message, which is the first."""
    systems = [message for message in messages if message["role"] == "system"]
    if not systems or (len(systems) == 1 and messages[0] is systems[0]):
        return messages
    text = "\n\n".join(plain_text(message["content"]) for message in systems)
    others = [message for message in messages if message["role"] != "system"]
    return [{**systems[0], "content": text}, *others]


def _in_order_of_calls(messages: Sequence[Any]) -> list[int]:
    """The messages' indices, with the tool results after a message in the order of its calls, if the ids
    tell it."""
    order = list(range(len(messages)))
    for is_result, run in groupby(order.copy(), lambda index: _get(messages[index], "role") == "tool"):
        indices = list(run)
        if not is_result or len(indices) < 2 or indices[0] == 0:
            continue
        calls = _get(messages[indices[0] - 1], "tool_calls")
        ids = [_get(call, "id") for call in calls] if isinstance(calls, Sequence) else []
        places = {id_: place for place, id_ in enumerate(ids) if isinstance(id_, str)}
        given = [_get(messages[index], "tool_call_id") for index in indices]
        known = [places[id_] for id_ in given if isinstance(id_, str) and id_ in places]
        if len(places) == len(ids) and len(set(known)) == len(given):
            order[indices[0] : indices[-1] + 1] = [
                index for _, index in sorted(zip(known, indices, strict=True))
            ]
    return order


def _get(value: object, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _message(message: object, where: str, pictures: list[GivenPicture] | None) -> dict[str, Any]:
    checked = dict(object_in(message, where))
    role = checked.get("role")
    if role not in ROLES:
        raise PromptError(f"{where}.role", f"is {role!r}; it must be one of {', '.join(ROLES)}")
    if role == "developer":
        role = checked["role"] = "system"
    if role == "function":  # the older form of a tool's result, and of a call
        role = checked["role"] = "tool"
    if role == "assistant":
        if (older := checked.pop("function_call", None)) is not None and not checked.get("tool_calls"):
            checked["tool_calls"] = [{"type": "function", "function": older}]
        if checked.get("audio") is not None:
            raise PromptError(f"{where}.audio", "is not served; content is")
        if (refusal := checked.pop("refusal", None)) is not None and checked.get("content") is None:
            checked["content"] = refusal  # where OpenAI's API has the text of an answer that refuses
    shown = pictures if role in _SHOW else None
    required = role in _NEEDS_CONTENT
    checked["content"] = _content(checked.get("content"), f"{where}.content", shown, required=required)
    if role == "assistant":
        checked.update(_reasoning(checked, where), **_tool_calls(checked, where))
    return checked


def _content(
    content: object, where: str, pictures: list[GivenPicture] | None, *, required: bool
) -> str | list[dict[str, Any]] | None:
    if isinstance(content, str) or (content is None and not required):
        return content
    if not isinstance(content, Sequence):
        raise PromptError(where, f"must be a string or a list of text parts, not {kind_of(content)}")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if isinstance(part, GivenPicture):  # from another API format
            if pictures is None:
                raise part.wrong("pictures are read of users and tools alone, with a vision tower (--mmproj)")
            pictures.append(part)
            parts.append({"type": "image"})
            continue
        kind = object_in(part, f"{where}[{index}]").get("type")
        if kind == "image_url" and pictures is not None:
            pictures.append(GivenPicture.of_part(part, f"{where}[{index}]"))
            parts.append({"type": "image"})
            continue
        if kind == "file":
            parts.append({"type": "text", "text": text_of_file(part.get("file"), f"{where}[{index}].file")})
            continue
        key = _TEXTS.get(kind) if isinstance(kind, str) else None
        if key is None:
            served = "'text', 'file' and 'image_url' are served"
            if pictures is None:
                served = "only 'text' and 'file' are served: no vision tower is loaded (--mmproj names one)"
            raise PromptError(f"{where}[{index}].type", f"is {kind!r}; {served}")
        parts.append({"type": "text", "text": text_in(part.get(key), f"{where}[{index}].{key}")})
    return parts


def _reasoning(message: dict[str, Any], where: str) -> dict[str, str]:
    """{"reasoning_content": text}, or {} if there is none: templates test whether the key exists."""
    for key in ("reasoning_content", "reasoning"):
        reasoning = message.pop(key, None)
        if reasoning is not None:
            return {"reasoning_content": text_in(reasoning, f"{where}.{key}")}
    return {}


def _tool_calls(message: dict[str, Any], where: str) -> dict[str, list[dict[str, Any]]]:
    """{"tool_calls": calls}, or {} if there are none."""
    where = f"{where}.tool_calls"
    calls = message.pop("tool_calls", None)
    if calls is None:
        return {}
    numbered = enumerate(list_in(calls, where))
    return {"tool_calls": [_tool_call(call, f"{where}[{index}]") for index, call in numbered]}


def _tool_call(call: object, where: str) -> dict[str, Any]:
    given = object_in(call, where)
    where = f"{where}.function"
    function = object_in(given.get("function"), where)
    text_in(function.get("name"), f"{where}.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # a limit may have cut them; what is no object is shown as it is
        found = read_object(arguments)
        arguments = {"arguments": arguments} if found is None else found
    if arguments is None:
        arguments = {}
    arguments = object_in(arguments, f"{where}.arguments")
    return {**given, "function": {**function, "arguments": arguments}}
