"""Structured output as grammars: a JSON schema, a regular expression, a choice, tool calls.

The grammars are Lark's in llguidance's dialect (docs/syntax.md of https://github.com/guidance-ai/llguidance).
A keyword that cannot be enforced is refused by name; none is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from qwen_serve.server.engine import LONGEST_GRAMMAR

from .errors import PromptError
from .schemas import (
    check_keywords,
    check_lark_numbers,
    check_numbers,
    json_value,
    understood,
    written_length,
)

WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})"
"""White space between JSON tokens, as in llama.cpp (json-schema-to-grammar.cpp, SPACE_RULE). It is enough for
the usual styles, and a small model cannot go on with white space forever. vLLM's backends set no limit."""

ANY = r"/(.|\n)*/"
LARK = re.compile(r"^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)
"""Distinguishes Lark from GBNF."""

MAX_REGEX = MAX_GBNF = 64 * 1024
MAX_RULES = 1_000
"""Most rules of a GBNF grammar. The time grows with their square: 0.2 s for this many, 3 s for 4,000."""


class Rules(Protocol):
    """What a grammar is composed of."""

    @property
    def lark(self) -> str: ...

    @property
    def param(self) -> str: ...

    @property
    def parts(self) -> tuple[tuple[str, str], ...]: ...


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
        raise PromptError(param, "must be a JSON schema, an object")
    check_keywords(schema, param)
    check_numbers(schema, param)
    return json_lark(understood(schema), param, white_space=white_space, flexible=flexible)


def regex_format(pattern: str, param: str) -> AnswerFormat:
    """A text that the whole of `pattern` (Rust's syntax, no look-around) matches."""
    return AnswerFormat(f"start: TEXT\nTEXT: {lark_regex(pattern, param)}", param)


def choice_format(choices: Sequence[str], param: str) -> AnswerFormat:
    """One of the texts. Raises PromptError."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise PromptError(param, "must be a list of texts, none of them empty")
    return AnswerFormat("start: " + " | ".join(map(lark_literal, choices)), param)


def grammar_format(text: str, param: str) -> AnswerFormat:
    """A grammar in Lark (llguidance's) or GBNF (llama.cpp's). Raises PromptError."""
    if LARK.search(text):
        check_lark_numbers(text, param)
        return AnswerFormat(text, param)
    if len(text) > MAX_GBNF or text.count("::=") > MAX_RULES:
        most = f"{MAX_RULES:,} rules and {MAX_GBNF:,} characters"
        raise PromptError(param, f"is longer than GBNF may be: {most}")
    try:
        return AnswerFormat(gbnf_to_lark(text), param)
    except Exception as error:  # the converter and its parser raise exceptions of any type
        raise PromptError(param, f"is no GBNF or Lark grammar: {error}") from None


def compose(answer: Rules, *, thinking: bool) -> str:
    """The grammar of everything generated; with `thinking`, the answer begins after `</think>`.

    Raises PromptError if it is too long.
    """
    grammars = [("answer", answer.lark), *answer.parts]
    check_length(sum(len(lark) for _, lark in grammars), answer.param)
    start = f'start: THINK </think> "\\n\\n" @answer\nTHINK: {ANY}' if thinking else "start: @answer"
    named = [{"name": name, "lark_grammar": lark} for name, lark in (("all", start), *grammars)]
    return json.dumps({"grammars": named}, ensure_ascii=False)


# --- Lark --------------------------------------------------------------------------------------------------


def json_lark(
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
        raise PromptError(param, f"has more than {LONGEST_GRAMMAR:,} characters as a grammar")


def lark_literal(text: str) -> str:
    """A literal text as a Lark expression."""
    return json.dumps(text, ensure_ascii=False)


def lark_regex(pattern: str, param: str) -> str:
    """A regular expression as a Lark terminal. Raises PromptError."""
    if len(pattern) > MAX_REGEX:
        raise PromptError(param, f"has more than {MAX_REGEX:,} characters")
    return f"/{regex_to_lark(pattern, use_ascii='')}/"
