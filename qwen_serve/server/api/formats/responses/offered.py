"""The tools of a Responses request: functions, alone or in a `namespace`; other kinds are left out.

As in vLLM, the model sees a namespace's function under the joined name; clients see both names separately.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qwen_serve.server.api.errors import bad_request
from qwen_serve.server.api.formats.left_out import names_of
from qwen_serve.server.chat.errors import list_in, object_in, text_in

Tool = dict[str, Any]


class OfferedTools:
    """The part of `tools` that the model is offered. Raises ApiError 400."""

    def __init__(self, tools: Sequence[tuple[str, Tool]]) -> None:
        """`tools` with their places. One that is given again, as in a replayed history, counts once."""
        self.functions: list[Tool] = []
        """The functions, in a chat request's form."""
        self.shown: list[Tool] = []
        """The same, in the client's form."""
        self._split: dict[str, tuple[str, str]] = {}
        """The model's name for a function -> its namespace and name."""
        self._known: set[str] = set()
        left_out: list[Any] = []
        for where, tool in tools:
            if tool in self.shown or tool in left_out:
                continue
            kind = text_in(tool.get("type"), f"{where}.type")
            if kind == "function":
                self._add(tool, where)
                self.shown.append(tool)
            elif kind == "namespace":
                members = self._members(tool, where)
                left_out += [member for member in members if member.get("type") != "function"]
                kept = [member for member in members if member.get("type") == "function"]
                self.shown += [{**tool, "tools": kept}] if kept else []
            else:
                left_out.append(tool)
        self.left_out = names_of(left_out)
        """Names of the tools that only OpenAI runs, or that only its models are trained to call."""

    def _members(self, tool: Tool, where: str) -> list[Tool]:
        namespace = text_in(tool.get("name"), f"{where}.name")
        members = []
        for index, one in enumerate(list_in(tool.get("tools"), f"{where}.tools")):
            place = f"{where}.tools[{index}]"
            member = dict(object_in(one, place))
            if text_in(member.get("type"), f"{place}.type") == "function":
                self._add(member, place, namespace)
            members.append(member)
        return members

    def _add(self, tool: Tool, where: str, namespace: str | None = None) -> None:
        own = text_in(tool.get("name"), f"{where}.name")
        name = joined(namespace, own)
        if namespace is not None:
            self._split[name] = namespace, own
        if name in self._split and name in self._known:
            raise bad_request(f"{where}.name", f"a model would know two tools as {name!r}")
        self._known.add(name)
        function = {key: value for key, value in tool.items() if key != "type" and value is not None}
        self.functions.append({"type": "function", "function": {**function, "name": name}})

    def names(self, name: str) -> dict[str, str]:
        """A call item's fields for the function that the model called `name`."""
        namespace, own = self._split.get(name, (None, name))
        return {"name": own} if namespace is None else {"name": own, "namespace": namespace}


def joined(namespace: str | None, name: str) -> str:
    """The model's name for a function."""
    return name if namespace is None else f"{namespace}__{name}"


def called(item: Mapping[str, Any], where: str) -> str:
    """The model's name for the function that an item calls. Raises ApiError 400."""
    namespace = item.get("namespace")
    if namespace is not None:
        namespace = text_in(namespace, f"{where}.namespace")
    return joined(namespace, text_in(item.get("name"), f"{where}.name"))
