"""Structural tags: free text in which certain strings begin a part with a required format.

The formats are xgrammar's (its docs/structural_tag), which vLLM and SGLang accept, except those of single
tokens. They become a grammar in llguidance's dialect of Lark. A format that such a grammar can enforce only
in part is refused.

Free text ends at its first mark: a trigger, or the end of the enclosing tag. For a mark of plain characters,
the text and the mark are one lazy terminal, which ends at its first match. A mark with a special token
(`<tool_call>`) needs no lazy terminal, because free text contains neither such tokens nor their names.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .errors import PromptError, list_in, object_in, text_in
from .formats import (
    ANY,
    AnswerFormat,
    grammar_format,
    json_expression,
    lark_literal,
    lark_regex,
)
from .lark_rules import LarkRules, either
from .schemas import json_value

KEYS = {
    "const_string": {"value"},
    "json_schema": {"json_schema", "style", "any_order"},
    "grammar": {"grammar"},
    "regex": {"pattern"},
    "any_text": {"excludes"},
    "sequence": {"elements"},
    "or": {"elements"},
    "optional": {"content"},
    "plus": {"content"},
    "star": {"content"},
    "repeat": {"content", "min", "max"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
    "dispatch": {"rules", "loop", "excludes"},
}
"""The supported formats, and the keys of each."""

MAX_REPEATS = 100_000
MAX_MARKS = 256


def structural_tag_format(value: object, param: str, special: Sequence[str]) -> AnswerFormat:
    """The format of a structural tag: {"type": "structural_tag", "format": {...}}, or vLLM's older
    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, or either as text.

    `special`: texts of the vocabulary's added tokens, which match as tokens. Raises PromptError.
    """
    if isinstance(value, str):
        value = json_value(value, param)
    if not isinstance(value, Mapping):
        raise PromptError(param, 'must be {"type": "structural_tag", "format": {...}}')
    where = f"{param}.format"
    format_ = value.get("format")
    if "structures" in value:
        where, format_ = param, _from_structures(value, param)
    return _Builder(param, special).answer(format_, where)


def _from_structures(value: Mapping[str, Any], param: str) -> dict[str, Any]:
    tags = []
    for index, structure in enumerate(list_in(value["structures"], f"{param}.structures")):
        where = f"{param}.structures[{index}]"
        schema = object_in(structure, where).get("schema")
        content = {"type": "json_schema", "json_schema": True if schema is None else schema}
        tags.append(
            {"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end")}
        )
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


class _Mark(NamedTuple):
    """A mark, which ends free text."""

    text: str
    """The mark's text."""
    until: str
    """The mark's text; if it ends inside a special token, extended to the token's end."""
    then: str
    """The expression after it, in Lark."""


class _Builder:
    """Writes the rules. An `expression` is part of a rule, a `regular` one part of a terminal."""

    def __init__(self, param: str, special: Sequence[str]) -> None:
        self._param = param
        named = sorted((text for text in special if re.fullmatch(r"<[^<>]+>", text)), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, named)) or r"(?!)")
        self._lark = LarkRules(param)
        self._parts: list[tuple[str, str]] = []
        self._terminals: dict[int, str | None] = {}
        """`id` of a format -> its terminal."""

    def answer(self, format_: object, where: str) -> AnswerFormat:
        """The whole answer."""
        start = self._followed(format_, where, (), last=True)
        lark = "\n".join([f"start: {start}", *self._lark.lines])
        return AnswerFormat(lark, self._param, parts=tuple(self._parts), calls=True)

    # --- formats -------------------------------------------------------------------------------------------

    def _followed(self, format_: object, where: str, ends: Sequence[str], *, last: bool = False) -> str:
        """A format followed by one of its `ends`. Without ends, what follows must be unambiguous, unless this
        is the `last`."""
        kind, given = self._known(format_, where)
        if kind in ("any_text", "triggered_tags", "dispatch"):
            if not ends and not last:
                raise PromptError(where, f"{kind} must be the last of a sequence, or a tag's content")
            if kind == "any_text":
                return self._until([], ends, self._texts(given, "excludes", where))
            return (self._triggered if kind == "triggered_tags" else self._dispatch)(given, where, ends)
        if kind == "sequence":
            return self._sequence(given, where, ends, last=last)
        if kind == "or":
            options = [
                self._followed(one, f"{where}.elements[{index}]", ends, last=last)
                for index, one in enumerate(self._elements(given, where))
            ]
            return either(options)
        regular = self._regular(format_, where)
        if regular is not None:
            return self._closed(regular, ends, where, last=last)
        return f"{self._limited(kind, given, where)} {self._one_of(ends)}"

    def _closed(
        self, regular: str, ends: Sequence[str], where: str, *, last: bool, lazy: bool = False
    ) -> str:
        """A regular expression and one of the `ends`, as one terminal that ends before the first special
        token."""
        if not ends:
            if not last:
                raise PromptError(where, "it must be followed by a const_string, to end somewhere")
            return self._lark.terminal(regular)
        options = []
        if plain := [end for end in ends if not self._special.search(end)]:
            text = f"({regular}) ({' | '.join(map(lark_literal, plain))})"
            options.append(self._lark.terminal(text, lazy=lazy))
        for end in ends:
            if token := self._special.search(end):
                before, rest = end[: token.start()], end[token.start() :]
                terminal = f"({regular}) {lark_literal(before)}" if before else regular
                options.append(f"{self._lark.terminal(terminal)} {self._literal(rest)}")
        return either(options)

    def _limited(self, kind: str, given: Mapping[str, Any], where: str) -> str:
        """A format that is not regular and ends by itself."""
        if kind == "const_string":
            return self._literal(self._text(given, "value", where))
        if kind == "json_schema":
            return self._json(given, where)
        if kind == "grammar":
            name = f"part{len(self._parts)}"
            lark = grammar_format(self._text(given, "grammar", where), f"{where}.grammar").lark
            self._parts.append((name, lark))
            self._lark.count(lark, where)
            return f"@{name}"
        if kind == "tag":
            return self._tag(given, where)
        if kind == "tags_with_separator":
            return self._separated(given, where)
        inner = self._followed(given.get("content"), f"{where}.content", ())
        return f"({inner}){self._times(kind, given, where)}"

    def _json(self, given: Mapping[str, Any], where: str) -> str:
        if given.get("style") not in (None, "json"):
            raise PromptError(f"{where}.style", "only json is enforced")
        if given.get("any_order"):
            raise PromptError(f"{where}.any_order", "the order is that of the schema")
        return self._lark.rule(json_expression(given.get("json_schema"), f"{where}.json_schema"))

    def _sequence(self, given: Mapping[str, Any], where: str, ends: Sequence[str], *, last: bool) -> str:
        """A sequence. Adjacent regular elements form one terminal, which ends at the first occurrence of the
        text after them."""
        elements = self._elements(given, where)
        parts: list[str] = []
        row: list[str] = []
        for index, element in enumerate(elements):
            place = f"{where}.elements[{index}]"
            is_last = index == len(elements) - 1
            regular = self._regular(element, place)
            if regular is not None:
                row.append(f"({regular})")
                if is_last:
                    parts.append(self._closed(" ".join(row), ends, place, last=last))
                continue
            if row:
                kind, text = self._known(element, place)
                before = self._text(text, "value", place) if kind == "const_string" else ""
                if not before:
                    raise PromptError(
                        place, "a const_string must be here, for what is before it to end somewhere"
                    )
                lazy = not self._special.search(before)
                parts.append(self._closed(" ".join(row), [before], place, last=False, lazy=lazy))
                row = []
                if is_last:
                    parts.append(self._one_of(ends))
                continue
            parts.append(self._followed(element, place, ends if is_last else (), last=last and is_last))
        if not elements:
            parts.append(self._one_of(ends))
        return " ".join(filter(None, parts)) or '""'

    def _tag(self, given: Mapping[str, Any], where: str, begun: int = 0) -> str:
        """A tag without the first `begun` characters of its `begin`."""
        begin = self._text(given, "begin", where)[begun:]
        end = given.get("end")
        ends = [end] if isinstance(end, str) else list_in(end, f"{where}.end")
        if not ends or not all(isinstance(one, str) for one in ends):
            raise PromptError(f"{where}.end", "must be a string, or a list of some")
        ends = [] if ends == [""] else ends
        if not all(ends):
            raise PromptError(f"{where}.end", "one of several cannot be empty")
        return f"{self._literal(begin)} {self._followed(given.get('content'), f'{where}.content', ends)}"

    def _tags(self, given: Mapping[str, Any], where: str) -> list[tuple[Mapping[str, Any], str]]:
        found = []
        for index, tag in enumerate(list_in(given.get("tags"), f"{where}.tags")):
            place = f"{where}.tags[{index}]"
            kind, one = self._known(tag, place, default="tag")
            if kind != "tag":
                raise PromptError(f"{place}.type", "must be tag")
            found.append((one, place))
        if not found:
            raise PromptError(f"{where}.tags", "is empty")
        return found

    def _separated(self, given: Mapping[str, Any], where: str) -> str:
        one = self._lark.rule(either([self._tag(tag, place) for tag, place in self._tags(given, where)]))
        separator = self._literal(self._text(given, "separator", where))
        more = "" if given.get("stop_after_first") else f" ({separator} {one})*"
        return f"({one}{more})" + ("" if given.get("at_least_one") else "?")

    def _triggered(self, given: Mapping[str, Any], where: str, ends: Sequence[str]) -> str:
        triggers = self._texts(given, "triggers", where)
        tags = self._tags(given, where)
        if not triggers or not all(triggers):
            raise PromptError(f"{where}.triggers", "must be a list of texts")
        marks = []
        for tag, place in tags:
            begin = self._text(tag, "begin", place)
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                raise PromptError(f"{place}.begin", "must start with one of the triggers, and with no other")
            until = self._whole_token(begin, len(matching[0]))
            marks.append(_Mark(matching[0], until, self._tag(tag, place, len(until))))
        unused = [trigger for trigger in triggers if all(mark.text != trigger for mark in marks)]
        if unused:
            raise PromptError(f"{where}.triggers", f"no tag begins with {unused[0]!r}")
        self._check_marks([*dict.fromkeys(triggers), *ends], where)
        excludes = self._texts(given, "excludes", where)
        once = bool(given.get("stop_after_first"))
        if not given.get("at_least_one"):
            return self._until(marks, ends, excludes, once=once)
        first = either([self._tag(tag, place) for tag, place in tags])
        return f"{first} {self._one_of(ends) if once else self._until(marks, ends, excludes)}"

    def _dispatch(self, given: Mapping[str, Any], where: str, ends: Sequence[str]) -> str:
        marks = []
        for index, rule in enumerate(list_in(given.get("rules"), f"{where}.rules")):
            place = f"{where}.rules[{index}]"
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise PromptError(place, "must be a text and a format")
            marks.append(_Mark(rule[0], rule[0], self._followed(rule[1], f"{place}[1]", ())))
        excludes = self._texts(given, "excludes", where)
        self._check_marks([*dict.fromkeys(mark.text for mark in marks), *ends], where)
        return self._until(marks, ends, excludes, once=given.get("loop") is False)

    def _check_marks(self, texts: Sequence[str], where: str) -> None:
        """Raises PromptError if one mark contains another: the shorter would always match first."""
        if len(texts) > MAX_MARKS:
            raise PromptError(where, f"has more than {MAX_MARKS:,} triggers and ends")
        for index, text in enumerate(texts):
            for place, other in enumerate(texts):
                if index != place and text in other:
                    raise PromptError(where, f"{text!r} lies within {other!r}; neither may")

    # --- free text -----------------------------------------------------------------------------------------

    def _until(
        self, marks: Sequence[_Mark], ends: Sequence[str], excludes: Sequence[str], *, once: bool = False
    ) -> str:
        """Free text up to one of the marks and what follows it, repeated unless `once`; then up to one of the
        `ends`, or the end of the answer."""
        exits = [_Mark(end, end, "") for end in ends]
        special = {mark.text: bool(self._special.search(mark.until)) for mark in (*marks, *exits)}
        plain = [text for text, holds in special.items() if not holds]
        spelled = [text for text, holds in special.items() if holds]
        banned = [*(text for text in excludes if text not in ends), *spelled]
        heads: dict[str, list[str]] = {}
        for mark in marks:
            heads.setdefault(mark.until, []).append(mark.then)
        body = [
            self._lark.rule(f"{self._head(until, plain, banned)} {either(then)}")
            for until, then in heads.items()
        ]
        outs = [self._head(mark.until, plain, banned) for mark in exits]
        outs = outs or [self._lark.terminal(_without([*plain, *banned]))]
        out = either(list(dict.fromkeys(outs)))
        if not body:
            return out
        if once:
            return self._lark.rule(f"{either(body)} {self._one_of(ends)} | {out}")
        return f"{either(body)}* {out}"

    def _head(self, mark: str, plain: Sequence[str], banned: Sequence[str]) -> str:
        """Free text and the mark that ends it."""
        token = self._special.search(mark)
        if token is None:
            text = f"({ANY} {lark_literal(mark)})"
            return self._lark.terminal(text if not banned else f"{text} & {_without(banned)}", lazy=True)
        before, behind = mark[: token.start()], mark[token.end() :]
        text = _without([*plain, *banned])
        if before:
            text = f"({ANY} {lark_literal(before)}) & {text}"
        return " ".join(filter(None, [self._lark.terminal(text), token[0], self._literal(behind)]))

    def _whole_token(self, text: str, length: int) -> str:
        """The first `length` characters; if they end inside a special token, extended to the token's end."""
        for token in self._special.finditer(text):
            if token.start() < length < token.end():
                return text[: token.end()]
        return text[:length]

    # --- what is regular -----------------------------------------------------------------------------------

    def _regular(self, format_: object, where: str) -> str | None:
        """A format as part of a terminal. None if it is not regular, or if it consists of fixed texts, which
        are unambiguous as rules."""
        expression = self._as_terminal(format_, where)
        return None if expression is None or not self._has_regex(format_) else expression

    def _has_regex(self, format_: object) -> bool:
        if not isinstance(format_, Mapping):
            return False
        inner = format_.get("elements") or [format_.get("content")]
        return format_.get("type") == "regex" or any(map(self._has_regex, inner))

    def _as_terminal(self, format_: object, where: str) -> str | None:
        known = self._terminals.get(id(format_), "")
        if known != "":
            return known
        self._terminals[id(format_)] = found = self._make_terminal(format_, where)
        return found

    def _make_terminal(self, format_: object, where: str) -> str | None:
        kind, given = self._known(format_, where)
        if kind == "const_string":
            text = self._text(given, "value", where)
            return None if self._special.search(text) else lark_literal(text)
        if kind == "regex":
            return lark_regex(self._text(given, "pattern", where), where)
        if kind in ("sequence", "or"):
            inner = [
                self._as_terminal(one, f"{where}.elements[{index}]")
                for index, one in enumerate(self._elements(given, where))
            ]
            if None in inner or not inner:
                return None
            return (" | " if kind == "or" else " ").join(f"({one})" for one in inner)
        if kind in ("optional", "plus", "star", "repeat"):
            content = self._as_terminal(given.get("content"), f"{where}.content")
            return None if content is None else f"({content}){self._times(kind, given, where)}"
        return None

    def _times(self, kind: str, given: Mapping[str, Any], where: str) -> str:
        if kind != "repeat":
            return {"optional": "?", "plus": "+", "star": "*"}[kind]
        least, most = given.get("min"), given.get("max")
        for key, value in (("min", least), ("max", most)):
            if type(value) is not int or not -1 <= value <= MAX_REPEATS:
                raise PromptError(f"{where}.{key}", f"must be a number up to {MAX_REPEATS:,}")
        assert isinstance(least, int) and isinstance(most, int)
        if least < 0 or -1 < most < least:
            raise PromptError(f"{where}.min", "must be from 0 to max")
        return f"{{{least},{'' if most == -1 else most}}}"

    # --- Lark ----------------------------------------------------------------------------------------------

    def _literal(self, text: str) -> str:
        """A text as part of a rule; special tokens in it match as tokens."""
        parts, at = [], 0
        for token in self._special.finditer(text):
            parts += [lark_literal(text[at : token.start()])] if token.start() > at else []
            parts.append(token[0])
            at = token.end()
        parts += [lark_literal(text[at:])] if at < len(text) else []
        return " ".join(parts)

    def _one_of(self, texts: Sequence[str]) -> str:
        return either(list(map(self._literal, texts))) if texts else ""

    # --- what is given -------------------------------------------------------------------------------------

    def _known(self, format_: object, where: str, default: str = "") -> tuple[str, Mapping[str, Any]]:
        """A format's type, and the format with its keys checked."""
        if not isinstance(format_, Mapping):
            raise PromptError(where, 'must be a format, an object with a "type"')
        self._lark.count(where, where)
        kind = format_.get("type", default)
        if not isinstance(kind, str) or kind not in KEYS:
            raise PromptError(f"{where}.type", f"{kind!r} cannot be enforced; {', '.join(KEYS)} can")
        for key, value in format_.items():
            if key not in KEYS[kind] and key != "type" and value is not None:
                raise PromptError(f"{where}.{key}", "cannot be enforced")
        return kind, format_

    def _elements(self, given: Mapping[str, Any], where: str) -> Sequence[Any]:
        return list_in(given.get("elements"), f"{where}.elements")

    def _text(self, given: Mapping[str, Any], key: str, where: str) -> str:
        return text_in(given.get(key), f"{where}.{key}")

    def _texts(self, given: Mapping[str, Any], key: str, where: str) -> list[str]:
        values = given.get(key) or []
        if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
            raise PromptError(f"{where}.{key}", "must be a list of texts, none of them empty")
        return values


def _without(texts: Sequence[str]) -> str:
    """Text that contains none of these."""
    if not texts:
        return ANY
    return f"({ANY} & ~({ANY} ({' | '.join(map(lark_literal, texts))}) {ANY}))"
