"""Parsing of a reply's text into reasoning, answer and calls, for any division into pieces."""

import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_serve.server.chat import Arguments, Content, Part, Reasoning, ReplyParser, ToolCall
from qwen_serve.server.chat.scanner import Scanner

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def parse(
    pieces: Iterable[str], *, limited: bool = False, **options: Any
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content and calls of a whole reply; of a call that was cut off its arguments' text."""
    parser = ReplyParser(**options)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.flush(limited=limited)
    assert all(isinstance(part, ToolCall) or part.text for part in parts)
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    arguments = {call.index: "" for call in calls}
    complete = set()
    for part in parts:
        if isinstance(part, Arguments):
            assert part.index not in complete
            arguments[part.index] += part.text
            complete |= {part.index} if part.last else set()
    assert complete == set(range(parser.tool_calls)), "only the last call may be cut off"
    found = [
        (call.name, json.loads(arguments[call.index]) if call.index in complete else arguments[call.index])
        for call in calls
    ]
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return reasoning, content, found


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("\n Hm. \n\n I see.\n</think>  Yes. \n", "Hm. \n\n I see.", "Yes. \n"),
        ("Hm.</think>", "Hm.", ""),
        ("\n</think>\n\nYes.", "", "Yes."),
        ("", "", ""),
        ("cut off in the midd", "cut off in the midd", ""),
        ("cut off </thi", "cut off </thi", ""),
        ("spaces at the end \n", "spaces at the end", ""),
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("<thi", "<thi", ""),
        ("a<think>b</think>c</think>d", "a<think>b", "c</think>d"),
        ("Hm.</think>\n\n<tool_call>x", "Hm.", "<tool_call>x"),
    ],
)
def test_thinking(text: str, reasoning: str, content: str) -> None:
    assert parse([text], thinking=True) == (reasoning, content, [])
    assert parse(text, thinking=True) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hm.\n</think>\n\nYes.", "<think>\nHm.\n</think>\n\nYes."),
        ("cut </th", "<think>\ncut </th"),
        ("<think>\nHm.</think>Yes.", "<think>\nHm.</think>Yes."),
        ("", ""),
    ],
)
def test_inline_thinking_is_left_as_written(text: str, content: str) -> None:
    assert parse([text], thinking=True, inline_reasoning=True) == ("", content, [])
    assert parse(text, thinking=True, inline_reasoning=True) == ("", content, [])


@pytest.mark.parametrize("text", ["", " Yes.\n", "</think> and <think>", CALL])
def test_without_thinking_and_tools_all_is_content(text: str) -> None:
    assert parse([text], thinking=False) == ("", text, [])


ADD = ("add", {"a": 1})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [ADD]),
        (f"Let me see.\n\n{CALL}\n{CALL}\n", "Let me see.", [ADD, ADD]),
        (f"{CALL} and then", "and then", [ADD]),
        ("No call. \n", "No call. \n", []),
        (f"The tag <tool_call> opens. {CALL}", "The tag <tool_call> opens.", [ADD]),
        (f" <tool_call>\n{CALL}", " <tool_call>", [ADD]),
        ("<tool_call>\n<function=add>\n<parameter=a", "<tool_call>\n<function=add>\n<parameter=a", []),
        (
            "<tool_call>\n<function=new>\n<parameter=a>\n1",
            "<tool_call>\n<function=new>\n<parameter=a>\n1",
            [],
        ),
        ("<tool_call>\n<function=add>\n<parameter=a>", "", [("add", "{")]),
        ("So: <tool_call>\n<function=add>\n<parameter=b>\nx y\n", "So:", [("add", '{"b": "x y')]),
        (
            f"<tool_call>\n<function=new>\n<parameter=a>\n{CALL}",
            "",
            [("new", {"a": "<tool_call>\n<function=add>\n<parameter=a>\n1"})],
        ),
        ("<tool_call><function=add></function></tool_call>", "", [("add", {})]),
        ("<tool_call><function=add>\n</function>\nand then", "and then", [("add", {})]),
        (
            "<tool_call><function=add><parameter=b>1</parameter><parameter=b>2</parameter></function></tool_call>",
            "",
            [("add", {"b": "1"})],
        ),
        ("<tool_call>{}</tool_call> x", "<tool_call>{}</tool_call> x", []),
        ("<tool_call>\n<function=add>\nx</function></tool_call>",) * 2 + ([],),
        ("<tool_ca", "<tool_ca", []),
        (
            "<tool_call><function=add><parameter=b>\n</tool_call>\n</parameter></function></tool_call>",
            "",
            [("add", {"b": "</tool_call>"})],
        ),
        (
            "<tool_call><function=new>\n<parameter=x>1</parameter></function></tool_call>",
            "",
            [("new", {"x": "1"})],
        ),
    ],
)
def test_calls(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert parse([text], thinking=False, tools=TOOLS) == ("", content, calls)
    assert parse(text, thinking=False, tools=TOOLS) == ("", content, calls)


GO = {"type": "function", "function": {"name": "address"}}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("So: <tool_call>", "So:", []),
        ("<tool_call>\n<func", "", []),
        ("<tool_call>\n<function=ad", "", []),
        ("<tool_call>\n<function=add", "", []),
        ("<tool_call>\n<function=add>", "", [("add", "")]),
        ("<tool_call>\n<function=add>\n<parameter=a", "", [("add", "")]),
        ("<tool_call>\n<function=add>\n</fun", "", [("add", "")]),
        ("<tool_call>\n<function=add>\n<parameter=a>", "", [("add", "{")]),
        ("<tool_call>\n<function=new>\n<parameter=b>\nx", "", [("new", '{"b": "x')]),
        ("<tool_call><function=add><parameter=b>\nx <b\n</para", "", [("add", '{"b": "x <b')]),
        ("<tool_call><function=add><parameter=b>\nx\n</parameter>", "", [("add", '{"b": "x"')]),
        ("<tool_call><function=add><parameter=a>\n7\n</parameter>\n</fun", "", [("add", '{"a": 7')]),
        ("<tool_call><function=add><parameter=b>x</parameter><parameter=a", "", [("add", '{"b": "x"')]),
        (f"{CALL}\n<tool_call>\n<function", "", [("add", {"a": 1})]),
        ("The tag <tool_call> opens", "The tag <tool_call> opens", []),
        ("<tool_call><function=>", "<tool_call><function=>", []),
        ("<tool_call>{", "<tool_call>{", []),
    ],
)
def test_a_call_that_a_token_limit_cuts_off(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    for pieces in ([text], text):
        assert parse(pieces, limited=True, thinking=False, tools=[*TOOLS, GO]) == ("", content, calls)


@pytest.mark.parametrize(
    ("written", "forced", "called"),
    [
        ("", ["add"], ["add"]),
        ("\n<function=", ["add"], ["add"]),
        ("", ["add", "address"], []),
        ("\n<function=add", ["add", "address"], []),
        ("\n<function=addr", ["add", "address"], ["address"]),
        ("\n<function=add>\n<par", ["add", "address"], ["add"]),
    ],
)
def test_a_forced_call_that_is_cut_off_has_a_name_as_soon_as_it_is_certain(
    written: str, forced: list[str], called: list[str]
) -> None:
    """Whatever cut it off: a stop string does, too."""
    for limited in (False, True):
        found = parse(
            ["<tool_call>" + written], limited=limited, thinking=False, tools=[*TOOLS, GO], forced=forced
        )
        assert found == ("", "", [(name, "") for name in called])


def test_a_call_ends_the_reasoning() -> None:
    """Models forget to close the block before a call."""
    assert parse([f"Hm.\n{CALL}"], thinking=True, tools=TOOLS) == ("Hm.", "", [ADD])
    assert parse([f"Hm.\n</think>\n\n{CALL}"], thinking=True, tools=TOOLS) == ("Hm.", "", [ADD])
    inline = parse([f"Hm.\n{CALL}"], thinking=True, tools=TOOLS, inline_reasoning=True)
    assert inline == ("", "<think>\nHm.\n</think>", [ADD])


def test_a_call_is_told_as_it_is_written() -> None:
    parser = ReplyParser(thinking=False, tools=TOOLS)
    assert parser.feed("Well.\n<tool_call>\n<function=add>\n<parameter=") == [Content("Well.")]
    [call, arguments] = parser.feed("b>")
    assert isinstance(call, ToolCall)
    assert (call.index, call.name, call.id[:5]) == (0, "add", "call_")
    assert arguments == Arguments(0, '{"b": "')
    steps: list[tuple[str, list[Part]]] = [
        ("\n", []),
        ('say "x"', [Arguments(0, 'say \\"x\\"')]),
        ("\n", []),
        ("\ny \\", [Arguments(0, "\\n\\ny \\\\")]),
        ("</para", []),
        ("meter>\n", []),
        ("é", [Arguments(0, "</parameter>\\né")]),
        ("\n</parameter>\n<parameter=a>\n", [Arguments(0, '"')]),
        ("1", []),
        ("2\n</parameter>\n", []),
        ("</function>", [Arguments(0, ', "a": 12}', last=True)]),
        ("\n</tool_call>", []),
        (" x", [Content("x")]),
    ]
    for text, parts in steps:
        assert parser.feed(text) == parts, text


def test_text_is_not_held_without_need() -> None:
    parser = ReplyParser(thinking=True, tools=TOOLS)
    steps: list[tuple[str, list[Part]]] = [
        ("\n", []),
        ("Hm", [Reasoning("Hm")]),
        (". ", [Reasoning(".")]),
        ("I <", [Reasoning(" I")]),
        ("b>", [Reasoning(" <b>")]),
        ("</thin", []),
        ("k>\n", []),
        ("\nYes", [Content("Yes")]),
        (" <tool", []),
        ("s>", [Content(" <tools>")]),
        ("<tool_call>", []),
        ("<func", []),
        ("y>", [Content("<tool_call><funcy>")]),
    ]
    for text, parts in steps:
        assert parser.feed(text) == parts, text


FRAGMENTS = [
    "a",
    " ",
    "\n",
    "<",
    "<think>",
    "</think>",
    "</thi",
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    CALL,
]
FRAGMENTS += ["<function=f>", "</function>", "<parameter=p>", "</parameter>", "<parameter=a>2</parameter>"]
replies = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    text=replies,
    cuts=st.lists(st.integers(0, 300), max_size=12),
    thinking=st.booleans(),
    inline=st.booleans(),
    tools=st.sampled_from([None, TOOLS]),
)
def test_the_parts_do_not_depend_on_the_cuts(
    text: str, cuts: list[int], thinking: bool, inline: bool, tools: list[dict[str, Any]] | None
) -> None:
    options: dict[str, Any] = {"thinking": thinking, "inline_reasoning": inline, "tools": tools}
    places = sorted(cut % (len(text) + 1) for cut in cuts)
    pieces = [text[start:end] for start, end in pairwise([0, *places, len(text)])]
    whole = parse([text], **options)
    assert parse(pieces, **options) == whole
    assert parse(text, **options) == whole


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(text=replies, thinking=st.booleans())
def test_nothing_but_tags_and_space_is_lost(text: str, thinking: bool) -> None:
    """All characters except those of calls are returned, in order."""
    reasoning, content, calls = parse([text], thinking=thinking, tools=TOOLS)
    if calls:
        return
    left = text.lstrip().removeprefix("<think>") if thinking else text
    if thinking and "<tool_call>" not in left.partition("</think>")[0]:
        left = left.replace("</think>", "", 1)
    assert "".join((reasoning + content).split()) == "".join(left.split())


class Counted(str):
    """Text that counts the characters that its methods read or copy."""

    looked = 0

    def find(self, part: str, start: Any = 0, *end: Any) -> int:
        found = super().find(part, start, *end)
        Counted.looked += (len(self) if found < 0 else found) - start
        return found

    def __getitem__(self, key: Any) -> str:
        part = Counted(super().__getitem__(key))
        Counted.looked += len(part)
        return part

    def __add__(self, other: str) -> str:
        both = Counted(super().__add__(other))
        Counted.looked += len(both)
        return both


def counted(scanner: Scanner, tags: Sequence[str]) -> re.Match[str] | None:
    found = Scanner._first(scanner, tags)  # noqa: SLF001 - a search whose looks are counted
    text, at = scanner._text, scanner._at  # noqa: SLF001
    Counted.looked += (len(text) if found is None else found.end()) - at
    return found


HEAD = "<tool_call><function=add><parameter=b>"


@pytest.mark.parametrize(
    ("start", "unit"),
    [
        (HEAD, "</tool_call>"),
        (HEAD, "</parameter>"),
        (HEAD, "</parameter>\n\n<parameter=x"),
        (f"{HEAD}</parameter>", " "),
        (f"{HEAD}</parameter><parameter=", "x"),
        ("", "<tool_call>"),
        ("", "<tool_call> <function=add>\n\n"),
        ("<tool_call>", " "),
        ("<tool_call><function=", "x"),
        ("x", "\n"),
        ("", "<think>"),
    ],
)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_work_grows_with_the_text_and_no_faster(start: str, unit: str, thinking: bool, whole: bool) -> None:
    def work(count: int) -> int:
        parser = ReplyParser(thinking=thinking, tools=TOOLS)
        scanner = parser._scanner  # noqa: SLF001 - every look at the text is counted
        scanner._text = Counted()  # noqa: SLF001
        scanner._first = partial(counted, scanner)  # type: ignore[method-assign]  # noqa: SLF001
        Counted.looked = 0
        text = start + unit * count
        for piece in [text] if whole else text:
            parser.feed(piece)
        parser.flush()
        return Counted.looked

    assert work(1000) < 2.2 * work(500)
