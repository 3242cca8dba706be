"""Structured output as grammars: a JSON schema, a regular expression, a choice, tool calls.

The grammars are Lark's in llguidance's dialect (docs/syntax.md of https://github.com/guidance-ai/llguidance).
A keyword that cannot be enforced is refused by name; none is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from qwen_serve.server.engine import LONGEST_GRAMMAR

from .errors import PromptError
from .schemas import (
    ANNOTATIONS,
    TEXTS,
    check_keywords,
    check_lark_numbers,
    check_numbers,
    json_value,
    understood,
    written_length,
)
from .tool_schemas import described_elsewhere, followed, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})"
"""White space between JSON tokens, as in llama.cpp (json-schema-to-grammar.cpp, SPACE_RULE). It is enough for
the usual styles, and a small model cannot go on with white space forever. vLLM's backends set no limit."""

ANY = r"/(.|\n)*/"
NO_CLOSE = f"({ANY} & ~({ANY} /<\\/parameter>/ {ANY}))"
NOT_JSON = r"~/\s*[\[{\"\-0-9](.|\n)*/"
"""Text that cannot be confused with a value of another type, for a tool's parameter of several types."""

LARK = re.compile(r"^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)
"""Distinguishes Lark from GBNF."""

MAX_REGEX = MAX_GBNF = 64 * 1024
MAX_RULES = 1_000
"""Most rules of a GBNF grammar. The time grows with their square: 0.2 s for this many, 3 s for 4,000."""

MAX_ALTERNATIVES = 1_000
"""Most alternatives for the values of a tool's parameters. Schemas with shared references multiply them."""


@dataclass(frozen=True)
class AnswerFormat:
    """The format of a whole answer: rules in Lark, the first of which is `start`."""

    lark: str
    param: str
    """The request's field that asks for it."""
    is_json: bool = False
    """Whether it may be combined with tool calls."""
    calls: bool = False
    """Whether it may contain tool calls, whose format it defines itself."""
    parts: tuple[tuple[str, str], ...] = ()
    """Separate grammars that the rules refer to (`@name`), by name."""

    def same_as(self, other: AnswerFormat) -> bool:
        """Whether both formats allow the same answers, as far as comparing two of their fields shows."""
        return replace(self, param="") == replace(other, param="")


# --- the whole answer --------------------------------------------------------------------------------------


def json_format(
    schema: object, param: str, *, white_space: str = WHITE_SPACE, flexible: bool = True
) -> AnswerFormat:
    """JSON that fits a schema, which may be given as JSON text. Raises PromptError."""
    lark = json_expression(schema, param, white_space=white_space, flexible=flexible)
    return AnswerFormat(f"start: {lark}", param, is_json=True)


def json_expression(
    schema: object, param: str, *, white_space: str = WHITE_SPACE, flexible: bool = True
) -> str:
    """`json_format` as a Lark expression."""
    if isinstance(schema, str):
        schema = json_value(schema, param)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise PromptError(f"{param} must be a JSON schema, an object", param)
    check_keywords(schema, param)
    check_numbers(schema, param)
    return _json(understood(schema), param, white_space=white_space, flexible=flexible)


def regex_format(pattern: str, param: str) -> AnswerFormat:
    """A text that the whole of `pattern` (Rust's syntax, no look-around) matches."""
    return AnswerFormat(f"start: TEXT\nTEXT: {lark_regex(pattern, param)}", param)


def choice_format(choices: Sequence[str], param: str) -> AnswerFormat:
    """One of the texts. Raises PromptError."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise PromptError(f"{param} must be a list of texts, none of them empty", param)
    return AnswerFormat("start: " + " | ".join(map(lark_literal, choices)), param)


def grammar_format(text: str, param: str) -> AnswerFormat:
    """A grammar in Lark (llguidance's) or GBNF (llama.cpp's). Raises PromptError."""
    if LARK.search(text):
        check_lark_numbers(text, param)
        return AnswerFormat(text, param)
    if len(text) > MAX_GBNF or text.count("::=") > MAX_RULES:
        most = f"{MAX_RULES:,} rules and {MAX_GBNF:,} characters"
        raise PromptError(f"{param} is longer than GBNF may be: {most}", param)
    try:
        return AnswerFormat(gbnf_to_lark(text), param)
    except Exception as error:  # the converter and its parser raise exceptions of any type
        raise PromptError(f"{param} is no GBNF or Lark grammar: {error}", param) from None


def compose(answer: AnswerFormat | ToolFormat, *, thinking: bool) -> str:
    """The grammar of everything generated; with `thinking`, the answer begins after `</think>`.

    Raises PromptError if it is too long.
    """
    grammars = [("answer", answer.lark)]
    if isinstance(answer, AnswerFormat):
        grammars += answer.parts
    elif answer.beside is not None:
        grammars.append(("beside", answer.beside.lark))
    check_length(sum(len(lark) for _, lark in grammars), answer.param)
    start = f'start: THINK </think> "\\n\\n" @answer\nTHINK: {ANY}' if thinking else "start: @answer"
    named = [{"name": name, "lark_grammar": lark} for name, lark in (("all", start), *grammars)]
    return json.dumps({"grammars": named}, ensure_ascii=False)


# --- tool calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolFormat:
    """Tool calls in Qwen3.5's format, optionally with text or another format instead."""

    lark: str
    param: str
    beside: AnswerFormat | None = None


def tool_format(
    tools: Sequence[Mapping[str, Any]],
    *,
    forced: bool,
    parallel: bool,
    beside: AnswerFormat | None = None,
    param: str = "tools",
) -> ToolFormat:
    """The format of tool calls (OpenAI's tools): only calls if `forced`, otherwise calls and text, or calls
    or `beside`. The parameters of a `strict` tool follow its schema. If calls are forced, those of other
    tools follow their schemas as far as these can be enforced. Raises PromptError naming a keyword that
    cannot be enforced."""
    rules: list[str] = []
    names: list[str] = []
    length = 0
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(f"tools[{index}].function.name must be a non-empty string", f"tools[{index}]")
        names.append(f"tool{index}")
        strict = function.get("strict") is True
        where = f"tools[{index}].function.parameters"
        for rule in _Parameters(f"tool{index}", function, where, strict=strict, forced=forced).rules():
            rules.append(rule)
            length += len(rule)
            check_length(length, param)
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
    return ToolFormat("\n".join([start, choices, *rules]), param, None if forced else beside)


class _Parameters:
    """Rules for calls of one function: its name, then its parameters in the schema's order."""

    def __init__(
        self, rule: str, function: Mapping[str, Any], where: str, *, strict: bool, forced: bool
    ) -> None:
        self._rule, self._name, self._where = rule, function["name"], where
        self._checked, self._strict = strict or forced, strict
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, Mapping):
            raise PromptError(f"{where} must be a JSON schema, an object", where)
        self._given = schema
        self._misread = False
        """Whether llguidance would misread a number of the schema."""
        self._root: Mapping[str, Any] = understood(schema or {})
        self._alternatives = 0
        """Alternatives of the current parameter."""

    def rules(self) -> Iterator[str]:
        """The Lark rules, one parameter's at a time."""
        head = lark_literal(f"{self._name}>\n")
        if not self._checked or (not self._strict and described_elsewhere(self._given or {})):
            parameter = f'"<parameter=" {self._rule}_name ">\\n" {self._rule.upper()}_V "\\n"'
            yield f"{self._rule}: {head} ({parameter})*"
            yield f"{self._rule}_name: /[^<>\\n]+/"
            yield f"{self._rule.upper()}_V: {NO_CLOSE} /\\n<\\/parameter>/"
            return
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
            raise PromptError(f"{self._where}.type must be object", f"{self._where}.type")
        place = f"{self._where}.required"
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise PromptError(f"{place} must be a list of names", place)
        required = dict.fromkeys(required)
        if unknown := [name for name in required if name not in properties]:
            raise PromptError(f"{place} names {unknown[0]!r}, which properties does not have", place)
        parts = []
        for index, (name, value) in enumerate(properties.items()):
            if not name or set(name) & set("<>\n"):
                raise PromptError(f"{self._where}.properties: {name!r} is no name", self._where)
            where = f"{self._where}.properties.{name}"
            rule = f"{self._rule}_p{index}"
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
        if others and self._misread:
            texts, others = [ANY], []
        alternatives, rules = [], []
        if others:
            defs = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
            whole = others[0] if len(others) == 1 else {"anyOf": others}
            alternatives.append(f'{_json({**whole, **defs}, where)} "\\n</parameter>\\n"')
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
            raise PromptError(f"{where} has more than {MAX_ALTERNATIVES:,} alternatives", where)
        if schema is True or schema == {}:
            return [ANY], []
        if not isinstance(schema, Mapping) or depth > 16:
            raise PromptError(f"{where} must be a JSON schema, an object", where)
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
                for index, option in enumerate(_list(schema[key], f"{where}.{key}")):
                    more_texts, more = self._split(option, f"{where}.{key}[{index}]", depth + 1)
                    texts, others = texts + more_texts, others + more
                if key == "oneOf" and (len(texts) > 1 or (texts and others) or len(others) > 1):
                    types: list[str | None] = ["string"] * len(texts)
                    types += [_type_of(other) for other in others]
                    if None in types or len(set(types)) < len(types):
                        raise PromptError(
                            f"{where}.oneOf: its options may overlap; use anyOf", f"{where}.oneOf"
                        )
                return texts, others
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else _list(schema["enum"], f"{where}.enum")
            self._refuse_others(schema, {"const", "enum", "type"}, where)
            words = [value for value in values if isinstance(value, str)]
            rest = [value for value in values if not isinstance(value, str)]
            return ["|".join(map(lark_literal, words))] if words else [], [{"enum": rest}] if rest else []
        kind = schema.get("type")
        names = [kind] if isinstance(kind, str) else kind
        if not isinstance(names, list):
            self._refuse_others(schema, {"type"}, where)
            raise PromptError(f"{where}.type is missing", f"{where}.type")
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
                message = f"{place}: {format_!r} cannot be enforced in a tool's parameter; use pattern"
                raise PromptError(message, place)
            parts.append(f"/{TEXTS[format_]}/")
        if (pattern := schema.get("pattern")) is not None:
            parts.append(_search(str(pattern)))
        least, most = (schema.get(key) for key in ("minLength", "maxLength"))
        for key, length in (("minLength", least), ("maxLength", most)):
            if not (length is None or (type(length) is int and length >= 0)):
                raise PromptError(f"{where}.{key} must be a number of characters", f"{where}.{key}")
        if least is not None or most is not None:
            parts.append(f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/")
        return " & ".join(f"({part})" for part in parts) or ANY

    def _resolve(self, schema: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        found = followed(schema, self._root)
        if found is None:
            raise PromptError(f"{where}.$ref leads nowhere", f"{where}.$ref")
        return found

    def _refuse_others(self, schema: Mapping[str, Any], known: Iterable[str], where: str) -> None:
        """Raises PromptError for keywords outside `known`, if they must be enforced."""
        others = [key for key in schema if key not in known and key not in ANNOTATIONS]
        if others and self._strict:
            raise PromptError(
                f"{where}.{others[0]} cannot be enforced in a tool's parameters", f"{where}.{others[0]}"
            )


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


# --- Lark --------------------------------------------------------------------------------------------------


def _json(
    schema: Mapping[str, Any], param: str, *, white_space: str = WHITE_SPACE, flexible: bool = True
) -> str:
    """An `understood` schema as a Lark expression. The options come last and override the request's own."""
    check_length(written_length(schema), param)
    options = {"lenient": False, "whitespace_flexible": flexible}
    if flexible:
        options["whitespace_pattern"] = white_space  # type: ignore[assignment]
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def check_length(length: int, param: str) -> None:
    """Raises PromptError for a grammar that is too long, before it is built and parsed."""
    if length > LONGEST_GRAMMAR:
        message = f"{param} has more than {LONGEST_GRAMMAR:,} characters as a grammar"
        raise PromptError(message, param)


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise PromptError(f"{where} must be a list", where)
    return value


def lark_literal(text: str) -> str:
    """A literal text as a Lark expression."""
    return json.dumps(text, ensure_ascii=False)


def lark_regex(pattern: str, param: str) -> str:
    """A regular expression as a Lark terminal. Raises PromptError."""
    if len(pattern) > MAX_REGEX:
        raise PromptError(f"{param} has more than {MAX_REGEX:,} characters", param)
    return f"/{regex_to_lark(pattern, use_ascii='')}/"


def _search(pattern: str) -> str:
    """JSON Schema's `pattern`, which may match anywhere in the text."""
    anything = r"(.|\n)*"
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern.removeprefix("^")
    inner = regex_to_lark(body[:-1] if ends else body, use_ascii="dw")
    return f"/{'' if pattern.startswith('^') else anything}({inner}){'' if ends else anything}/"
