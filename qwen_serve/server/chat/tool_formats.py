"""Tool calls as a grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llguidance import regex_to_lark

from .errors import PromptError, list_in
from .formats import ANY, AnswerFormat, check_length, json_lark, lark_literal
from .schemas import ANNOTATIONS, TEXTS, check_keywords, check_numbers, understood
from .tool_schemas import described_elsewhere, followed, resolve

NO_CLOSE = f"({ANY} & ~({ANY} /<\\/parameter>/ {ANY}))"
NOT_JSON = r"~/\s*[\[{\"\-0-9](.|\n)*/"
"""Text that cannot be confused with a value of another type, for a tool's parameter of several types."""

MAX_ALTERNATIVES = 1_000
"""Most alternatives for the values of a tool's parameters. Schemas with shared references multiply them."""


@dataclass(frozen=True)
class ToolFormat:
    """Tool calls in Qwen3.5's format, optionally with text or another format instead."""

    lark: str
    param: str
    beside: AnswerFormat | None = None
    places: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """Rule of a parameter's value -> the parameter's path in the request, and whether its tool is strict."""
    free: frozenset[str] = frozenset()
    """Rules of parameters whose schemas cannot be enforced, and need not be."""
    freed: Callable[[frozenset[str]], ToolFormat] | None = None
    """Makes the format with these rules free."""

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """Separate grammars that the rules refer to, by name."""
        return () if self.beside is None else (("beside", self.beside.lark),)

    def loosened(self, error: str) -> ToolFormat | None:
        """The format without the schema that llguidance refused with `error`; without all schemas that need
        not be enforced if the error does not say which one it is, or after many. None if there is none.
        Raises PromptError naming a strict tool's parameter."""
        at = _LINE.match(error)
        line = self.lark.split("\n")[int(at[1]) - 1] if at else ""
        found = _RULE.match(line)
        rule = found[1].lower() if found else ""
        if rule in self.places:
            where, strict = self.places[rule]
            if strict:
                raise PromptError(where, f"cannot be enforced: {error.splitlines()[0]}")
        loose = frozenset(name for name, (_, strict) in self.places.items() if not strict)
        if rule in self.places and rule not in self.free and len(self.free) < MOST_FREED:
            loose = self.free | {rule}
        return None if self.freed is None or loose <= self.free else self.freed(loose)


_LINE = re.compile(r"at (\d+)\(")
_RULE = re.compile(r"(tool\d+_p\d+_v)", re.IGNORECASE)

MOST_FREED = 32
"""Most parameters that are freed one at a time, each for a compilation."""


def tool_format(
    tools: Sequence[Mapping[str, Any]],
    *,
    forced: bool,
    parallel: bool,
    beside: AnswerFormat | None = None,
    param: str = "tools",
    free: frozenset[str] = frozenset(),
) -> ToolFormat:
    """The format of tool calls (OpenAI's tools): only calls if `forced`, otherwise calls and text, or calls
    or `beside`. The parameters of a `strict` tool follow its schema. If calls are forced, those of other
    tools follow their schemas as far as these can be enforced, except for the rules in `free`. Raises
    PromptError naming a keyword that cannot be enforced."""
    rules: list[str] = []
    names: list[str] = []
    places: dict[str, tuple[str, bool]] = {}
    length = 0
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(f"tools[{index}].function.name", "must be a non-empty string")
        names.append(f"tool{index}")
        strict = function.get("strict") is True
        where = f"tools[{index}].function.parameters"
        made = _Parameters(f"tool{index}", function, where, strict=strict, forced=forced, free=free)
        for rule in made.rules():
            rules.append(rule)
            length += len(rule)
            check_length(length, param)
        places |= made.places
    call = '<tool_call> "\\n<function=" call "</function>\\n" </tool_call>'
    if forced:
        start = f'start: one ("\\n" one)*\none: {call}' if parallel else f"start: {call}"
    else:
        text = f"TEXT: {ANY}"
        more = '("\\n" one)*' if parallel else ""
        if beside is not None:
            start = f"start: calls | @beside\ncalls: one {more}\none: {call}"
        elif parallel:
            start = f"start: TEXT (one TEXT)*\none: {call}\n{text}"
        else:
            start = f"start: TEXT one?\none: {call}\n{text}"
    choices = f"call: {' | '.join(names)}"
    again = partial(tool_format, tools, forced=forced, parallel=parallel, beside=beside, param=param)
    lark = "\n".join([start, choices, *rules])
    return ToolFormat(lark, param, None if forced else beside, places, free, lambda more: again(free=more))


class _Parameters:
    """Rules for calls of one function: its name, then its parameters in the schema's order."""

    def __init__(
        self,
        rule: str,
        function: Mapping[str, Any],
        where: str,
        *,
        strict: bool,
        forced: bool,
        free: frozenset[str],
    ) -> None:
        self._free = free
        self.places: dict[str, tuple[str, bool]] = {}
        """As in ToolFormat."""
        self._rule, self._name, self._where = rule, function["name"], where
        self._checked, self._strict = strict or forced, strict
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, Mapping):
            raise PromptError(where, "must be a JSON schema, an object")
        self._given = schema
        self._misread = False
        """Whether llguidance would misread a number of the schema."""
        self._root: Mapping[str, Any] = understood(schema or {})
        self._alternatives = 0
        """Alternatives of the current parameter."""

    def rules(self) -> Iterator[str]:
        """The Lark rules, one parameter's at a time."""
        if not self._checked or (not self._strict and described_elsewhere(self._given or {})):
            yield from self._any_parameters()
        elif self._strict:
            yield from self._declared()
        else:
            try:
                yield from list(self._declared())
            except PromptError:  # of a schema that need not be enforced
                yield from self._any_parameters()

    def _any_parameters(self) -> Iterator[str]:
        head = lark_literal(f"{self._name}>\n")
        parameter = f'"<parameter=" {self._rule}_name ">\\n" {self._rule.upper()}_V "\\n"'
        yield f"{self._rule}: {head} ({parameter})*"
        yield f"{self._rule}_name: /[^<>\\n]+/"
        yield f"{self._rule.upper()}_V: {NO_CLOSE} /\\n<\\/parameter>/"

    def _declared(self) -> Iterator[str]:
        head = lark_literal(f"{self._name}>\n")
        check_keywords((self._strict and self._given) or {}, self._where)
        try:
            check_numbers(self._given, self._where)
        except PromptError:
            if self._strict:
                raise
            self._misread = True
        schema = self._resolve(self._root, self._where)
        self._refuse_others(schema, {"type", "properties", "required", "additionalProperties"}, self._where)
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
            raise PromptError(f"{self._where}.type", "must be object")
        place = f"{self._where}.required"
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise PromptError(place, "must be a list of names")
        required = dict.fromkeys(required)
        if self._strict and (unknown := [name for name in required if name not in properties]):
            raise PromptError(place, f"names {unknown[0]!r}, which properties does not have")
        parts = []
        for index, (name, value) in enumerate(properties.items()):
            if not name or set(name) & set("<>\n"):
                raise PromptError(f"{self._where}.properties", f"{name!r} is no name")
            where = f"{self._where}.properties.{name}"
            rule = f"{self._rule}_p{index}"
            self.places[f"{rule}_v"] = where, self._strict
            parts.append(rule if name in required else f"{rule}?")
            yield f"{rule}: {lark_literal(f'<parameter={name}>' + chr(10))} {rule}_v"
            yield "\n".join(self._value(f"{rule}_v", value, where))
        yield f"{self._rule}: {head} {' '.join(parts)}"

    def _value(self, rule: str, schema: object, where: str) -> list[str]:
        self._alternatives = 0
        try:
            texts, others = self._split(schema, where)
        except PromptError:
            if self._strict:
                raise
            texts, others = [ANY], []  # any text is allowed, since the request does not require the schema
        if rule in self._free and not self._strict:
            kind = schema.get("type") if isinstance(schema, Mapping) else None
            known = kind in ("array", "object", "boolean", "integer", "number", "null")
            texts, others = ([], [{"type": kind}]) if known and not texts else ([ANY], [])
        if others and self._misread:
            texts, others = [ANY], []
        alternatives, rules = [], []
        if others:
            defs = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
            whole = others[0] if len(others) == 1 else {"anyOf": others}
            alternatives.append(f'{json_lark({**whole, **defs}, where)} "\\n</parameter>\\n"')
        for index, text in enumerate(texts):
            name = f"{rule.upper()}_T{index}"
            plain = f"({text}) & {NOT_JSON}" if others and _mixes(others) else f"({text})"
            alternatives.append(f'{name} "\\n"')
            rules += [f"{name}: {name}_X /\\n<\\/parameter>/", f"{name}_X: {plain} & {NO_CLOSE}"]
        return [f"{rule}: {' | '.join(alternatives)}", *rules]

    def _split(self, schema: object, where: str, depth: int = 0) -> tuple[list[str], list[dict[str, Any]]]:
        """Splits a schema into regular expressions (Lark) for its strings, and schemas for the rest."""
        self._alternatives += 1
        if self._alternatives > MAX_ALTERNATIVES:
            raise PromptError(where, f"has more than {MAX_ALTERNATIVES:,} alternatives")
        if schema is True or schema == {}:
            return [ANY], []
        if not isinstance(schema, Mapping) or depth > 16:
            raise PromptError(where, "must be a JSON schema, an object")
        if "$ref" in schema:
            self._refuse_others(schema, {"$ref"}, where)
            if not _may_be_text(resolve(schema["$ref"], self._root), self._root):
                return [], [dict(schema)]
            return self._split(resolve(schema["$ref"], self._root), where, depth + 1)
        if "oneOf" in schema and not _may_be_text(schema, self._root):
            return [], [dict(schema)]
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            self._refuse_others(schema, {"allOf"}, where)
            return self._split(schema["allOf"][0], f"{where}.allOf[0]", depth + 1)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                self._refuse_others(schema, {key}, where)
                texts: list[str] = []
                others: list[dict[str, Any]] = []
                for index, option in enumerate(list_in(schema[key], f"{where}.{key}")):
                    more_texts, more = self._split(option, f"{where}.{key}[{index}]", depth + 1)
                    texts, others = texts + more_texts, others + more
                if key == "oneOf" and (len(texts) > 1 or (texts and others) or len(others) > 1):
                    types: list[str | None] = ["string"] * len(texts)
                    types += [_type_of(other) for other in others]
                    if None in types or len(set(types)) < len(types):
                        raise PromptError(f"{where}.oneOf", "its options may overlap; use anyOf")
                return texts, others
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else list_in(schema["enum"], f"{where}.enum")
            self._refuse_others(schema, {"const", "enum", "type"}, where)
            words = [value for value in values if isinstance(value, str)]
            rest = [value for value in values if not isinstance(value, str)]
            return ["|".join(map(lark_literal, words))] if words else [], [{"enum": rest}] if rest else []
        kind = schema.get("type")
        names = [kind] if isinstance(kind, str) else kind
        if not isinstance(names, list):
            self._refuse_others(schema, {"type"}, where)
            raise PromptError(f"{where}.type", "is missing")
        if names == ["string"]:
            self._refuse_others(schema, {"type", "pattern", "minLength", "maxLength", "format"}, where)
        others = []
        if rest := [name for name in names if name != "string"]:
            others = [{**schema, "type": rest if len(rest) > 1 else rest[0]}]
        return ([self._text(schema, where)] if "string" in names else []), others

    def _text(self, schema: Mapping[str, Any], where: str) -> str:
        parts = []
        if (format_ := schema.get("format")) is not None:
            if not isinstance(format_, str) or format_ not in TEXTS:
                place = f"{where}.format"
                raise PromptError(place, f"{format_!r} cannot be enforced in a tool's parameter; use pattern")
            parts.append(f"/{TEXTS[format_]}/")
        if (pattern := schema.get("pattern")) is not None:
            parts.append(_search(str(pattern)))
        least, most = (schema.get(key) for key in ("minLength", "maxLength"))
        for key, length in (("minLength", least), ("maxLength", most)):
            if not (length is None or (type(length) is int and length >= 0)):
                raise PromptError(f"{where}.{key}", "must be a number of characters")
        if least is not None or most is not None:
            parts.append(f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/")
        return " & ".join(f"({part})" for part in parts) or ANY

    def _resolve(self, schema: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        found = followed(schema, self._root)
        if found is None:
            raise PromptError(f"{where}.$ref", "leads nowhere")
        return found

    def _refuse_others(self, schema: Mapping[str, Any], known: Iterable[str], where: str) -> None:
        """Raises PromptError for keywords outside `known`, if they must be enforced."""
        others = [key for key in schema if key not in known and key not in ANNOTATIONS]
        if others and self._strict:
            raise PromptError(f"{where}.{others[0]}", "cannot be enforced in a tool's parameters")


def _may_be_text(schema: object, root: Mapping[str, Any]) -> bool:
    """Whether a schema allows a string. Each part is read once, since references may share their targets."""
    unread, seen = [schema], set()
    while unread:
        part = unread.pop()
        if not isinstance(part, Mapping):
            return True
        if id(part) in seen:
            continue
        seen.add(id(part))
        if "$ref" in part:
            unread.append(resolve(part["$ref"], root))
            continue
        options = next((part[key] for key in ("anyOf", "oneOf") if key in part), None)
        if isinstance(options, list):
            unread += options
        elif "const" in part or "enum" in part:
            values = [part["const"]] if "const" in part else part["enum"]
            if not isinstance(values, list) or any(isinstance(value, str) for value in values):
                return True
        else:
            types = part.get("type")
            if types is None or types == "string" or (isinstance(types, list) and "string" in types):
                return True
    return False


def _type_of(schema: Mapping[str, Any]) -> str | None:
    kind = schema.get("type")
    return kind if isinstance(kind, str) and kind != "number" else None


def _mixes(others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a text could look like a value of these schemas without fitting one."""
    return any(other.get("type") not in ("null", "boolean") for other in others)


def _search(pattern: str) -> str:
    """JSON Schema's `pattern`, which may match anywhere in the text."""
    anything = r"(.|\n)*"
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern.removeprefix("^")
    inner = regex_to_lark(body[:-1] if ends else body, use_ascii="dw")
    return f"/{'' if pattern.startswith('^') else anything}({inner}){'' if ends else anything}/"
