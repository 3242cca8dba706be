"""Structural tags: the texts that their grammars allow."""

from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from qwen_serve.server.chat import PromptError
from qwen_serve.server.chat.formats import compose
from qwen_serve.server.chat.structural_tags import structural_tag_format

SPECIAL = ("<tool_call>", "</tool_call>", "</think>")


class Bytes:
    """A tokenizer of bytes, and the special tokens."""

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"\xff" + text.encode() for text in SPECIAL]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id, self.bos_token_id = 0, None

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()))


def ids(text: str) -> list[int]:
    """Special tokens where their names stand; `\\0` in front of one spells it out."""
    found: list[int] = []
    while text:
        name = next((name for name in SPECIAL if text.startswith(name)), None)
        if name is not None:
            found.append(256 + SPECIAL.index(name))
            text = text[len(name) :]
        else:
            spelled = 2 if text[0] == "\0" else 1
            found += text[spelled - 1].encode()
            text = text[spelled:]
    return found


def judged(tag: Any, text: str) -> str:
    """Whether a text is complete for a tag, the beginning of one, or wrong."""
    grammar = compose(structural_tag_format(tag, "tag", SPECIAL), thinking=False)
    matcher = LLMatcher(tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    wanted = ids(text)
    if matcher.try_consume_tokens(wanted) < len(wanted):
        return "wrong"
    return "whole" if matcher.is_accepting() else "begun"


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
ANY = {"type": "any_text"}
WORD = {"type": "regex", "pattern": "[a-z]+"}
CALL = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("<f=a>", JSON, "</f>")]}
GOOD = '<f=a>{"x":1}</f>'

OLD = {
    "structures": [
        {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=ab>", "schema": {"type": "null"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
QWEN = {
    "type": "triggered_tags",
    "triggers": ["<tool_call>"],
    "tags": [tag('<tool_call>\n{"name": "f", "arguments": ', JSON, "}\n</tool_call>")],
}
CUT = {"type": "triggered_tags", "triggers": ["<tool"], "tags": [tag("<tool_call>", JSON, "</tool_call>")]}
INSIDE = tag("<r>", CALL, "</r>")
THOUGHTS = {"type": "sequence", "elements": [tag("", ANY, "\n</think>\n"), JSON]}
DISPATCH = {"type": "dispatch", "rules": [["<a>", JSON], ["<b>", const("!!")]]}
LISTED = {"type": "tags_with_separator", "separator": ",", "tags": [tag("<i>", JSON, "</i>")]}


@pytest.mark.parametrize(
    ("format_", "whole", "begun", "wrong"),
    [
        (
            OLD,
            ["", "<f", "hello " + GOOD + " bye", GOOD + "<f=ab>null</f>"],
            ["<<f=", '<f<f=a>{"x": 12', "a" + GOOD + "b<f="],
            ["<f=ab>{", "<f=c", '<f=a>{"y":', GOOD + "x<f=b"],
        ),
        (
            QWEN,
            ["hi", 'hi<tool_call>\n{"name": "f", "arguments": {"x":3}}\n</tool_call>', "<tool_call"],
            ["<tool_call>\n"],
            ['<tool_call>\n{"name": "g', "\0<tool_call>", "hi</tool_call>"],
        ),
        (CUT, ['hi<tool_call>{"x":3}</tool_call>a'], ["<tool_call>"], ["\0<tool_call>", "<tool"]),
        ({**CALL, "stop_after_first": True}, ["abc", GOOD], ["<f="], [GOOD + "a"]),
        ({**CALL, "at_least_one": True}, [GOOD + " and " + GOOD], ["", "<f"], ["abc"]),
        ({**CALL, "at_least_one": True, "stop_after_first": True}, [GOOD], [""], ["a", GOOD + "a"]),
        ({**CALL, "excludes": ["BAD"]}, ["BA", "BA" + GOOD + "D"], [], ["aBAD"]),
        (INSIDE, ["<r>x" + GOOD + "y</r>", "<r></r>"], ["<r>" + GOOD + "</r"], ["<r>x</r>y"]),
        (THOUGHTS, ['abc\n\n</think>\n{"x":1}'], ["a\nb"], ["abc</think>", "a\n\0</think>\n"]),
        (
            {"type": "sequence", "elements": [tag("<r>", ANY, "aa"), const("!")]},
            ["<r>xaa!", "<r>aa!"],
            ["<r>"],
            ["<r>xaaa"],
        ),
        (tag("<n>", WORD, "end"), ["<n>fooend", "<n>fooendend"], ["<n>foo", "<n>end"], ["<n>f end"]),
        (
            {"type": "sequence", "elements": [WORD, const(": "), JSON]},
            ['abc: {"x":1}'],
            ["abc"],
            ["abc:{", ": "],
        ),
        (
            {"type": "sequence", "elements": [WORD, {"type": "regex", "pattern": "[a-c]+x"}]},
            ["abcx", "zax"],
            ["zx"],
            ["1"],
        ),
        ({"type": "or", "elements": [const("yes"), const("no"), JSON]}, ["no", '{"x":1}'], ["n"], ["yesno"]),
        (
            {"type": "sequence", "elements": [{"type": "star", "content": const("a")}, const("ab")]},
            ["ab", "aaab"],
            ["aa"],
            ["b"],
        ),
        (
            {"type": "sequence", "elements": [{"type": "optional", "content": const("So: ")}, JSON]},
            ['{"x":1}', 'So: {"x":1}'],
            ["So"],
            ["x"],
        ),
        (
            {"type": "repeat", "min": 1, "max": 2, "content": tag("<i>", JSON, "</i>")},
            ['<i>{"x":1}</i>', '<i>{"x":1}</i>' * 2],
            [""],
            ['<i>{"x":1}</i>' * 2 + "<"],
        ),
        (LISTED, ["", '<i>{"x":1}</i>,<i>{"x":2}</i>'], ['<i>{"x":1}</i>,'], ["a"]),
        ({**LISTED, "at_least_one": True, "stop_after_first": True}, ['<i>{"x":1}</i>'], [""], [","]),
        (DISPATCH, ["x", 'x<a>{"x":1}y<b>!!z'], ["x<a>"], ["<b>x"]),
        (
            tag("<r>", {**DISPATCH, "loop": False, "excludes": ["</r>"]}, "</r>"),
            ["<r>x</r>", '<r>x<a>{"x":1}</r>'],
            [],
            ['<r>x<a>{"x":1} '],
        ),
        (tag("<r>", JSON, ["</r>", "</s>"]), ['<r>{"x":1}</s>'], ["<r>{"], ['<r>{"x":1}</q']),
        (
            tag("<r>", {"type": "grammar", "grammar": 'root ::= "yes" | "no" root'}, "</r>"),
            ["<r>nonoyes</r>"],
            ["<r>no"],
            ["<r>q"],
        ),
        ({"type": "plus", "content": const("</think>")}, ["</think></think>"], [""], ["\0</think>", "a"]),
        ({"type": "sequence", "elements": [const("a"), ANY]}, ["a", "abc"], [""], ["b"]),
    ],
)
def test_texts(format_: Any, whole: list[str], begun: list[str], wrong: list[str]) -> None:
    given = format_ if "structures" in format_ else {"type": "structural_tag", "format": format_}
    for wanted, texts in (("whole", whole), ("begun", begun), ("wrong", wrong)):
        for text in texts:
            assert judged(given, text) == wanted, text


@pytest.mark.parametrize(
    ("format_", "param", "word"),
    [
        ({"type": "token", "token": 1}, "tag.format.type", "'token'"),
        ({"type": ["tag"]}, "tag.format.type", "cannot be enforced"),
        ({**ANY, "max_tokens": 5}, "tag.format.max_tokens", "max_tokens"),
        ({**JSON, "style": "qwen_xml"}, "tag.format.style", "json"),
        ({**JSON, "any_order": True}, "tag.format.any_order", "order"),
        ({"type": "json_schema", "json_schema": 5}, "tag.format.json_schema", "object"),
        ({"type": "sequence", "elements": [ANY, const("a")]}, "tag.format.elements[0]", "last"),
        ({"type": "sequence", "elements": [WORD, JSON]}, "tag.format.elements[1]", "const_string"),
        ({"type": "star", "content": {"type": "or", "elements": [WORD, JSON]}}, None, "const_string"),
        ({"type": "sequence", "elements": 5}, "tag.format.elements", "list"),
        (tag("<a>", ANY, ""), "tag.format.content", "last"),
        (tag("<a>", JSON, [""]), None, None),
        (tag("<a>", JSON, ["", "x"]), "tag.format.end", "empty"),
        (tag("<a>", JSON, 5), "tag.format.end", "list"),
        ({"type": "tag", "content": JSON, "end": "x"}, "tag.format.begin", "string"),
        ({**CALL, "triggers": []}, "tag.format.triggers", "texts"),
        ({**CALL, "triggers": ["<f=", "<f=a"]}, "tag.format.tags[0].begin", "one of the triggers"),
        ({**CALL, "triggers": ["<f=", "<g="]}, "tag.format.triggers", "<g="),
        ({**CALL, "tags": []}, "tag.format.tags", "empty"),
        (tag("<r>", CALL, "f="), "tag.format.content", "within"),
        ({**DISPATCH, "rules": [["<a>"]]}, "tag.format.rules[0]", "text and a format"),
        ({"type": "repeat", "min": 3, "max": 2, "content": JSON}, "tag.format.min", "max"),
        ({"type": "repeat", "min": 0, "max": 10**9, "content": JSON}, "tag.format.max", "100,000"),
        (None, "tag.format", "object"),
    ],
)
def test_what_is_refused_is_named(format_: Any, param: str | None, word: str | None) -> None:
    value = {"type": "structural_tag", "format": format_}
    if word is None:
        structural_tag_format(value, "tag", SPECIAL)
        return
    with pytest.raises(PromptError, match=word) as refusal:
        structural_tag_format(value, "tag", SPECIAL)
    assert param is None or refusal.value.param == param


@pytest.mark.parametrize("value", [5, "{", [], {"structures": 5}, {"structures": [5]}, {"structures": []}])
def test_what_is_no_tag_is_refused(value: Any) -> None:
    with pytest.raises(PromptError, match="tag"):
        structural_tag_format(value, "tag", SPECIAL)


def test_wide_and_deep_tags_end() -> None:
    """Width and depth are limited, since each level processes those below it."""
    deep: Any = {"type": "or", "elements": [WORD] * 100_000}
    for _ in range(90):
        deep = {"type": "sequence", "elements": [deep, const("x")]}
    with pytest.raises(PromptError, match="characters as a grammar"):
        structural_tag_format({"format": deep}, "tag", SPECIAL)
