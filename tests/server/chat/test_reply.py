"""A reply's text to reasoning, answer and calls, however it is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.chat import Content, Part, Reasoning, ReplyParser, ToolCall

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


def parse(pieces: Iterable[str], **options: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content and calls of a whole reply."""
    parser = ReplyParser(**options)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.flush()
    assert all(isinstance(part, ToolCall) or part.text for part in parts)
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert [call.index for call in calls] == list(range(parser.tool_calls))
    assert len({call.id for call in calls}) == len(calls)
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return reasoning, content, [(call.name, json.loads(call.arguments)) for call in calls]


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
        ("<tool_call>\n<function=add>\n<parameter=a>", "<tool_call>\n<function=add>\n<parameter=a>", []),
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


def test_a_call_ends_the_reasoning() -> None:
    """Models forget to close the block before a call."""
    assert parse([f"Hm.\n{CALL}"], thinking=True, tools=TOOLS) == ("Hm.", "", [ADD])
    assert parse([f"Hm.\n</think>\n\n{CALL}"], thinking=True, tools=TOOLS) == ("Hm.", "", [ADD])
    inline = parse([f"Hm.\n{CALL}"], thinking=True, tools=TOOLS, inline_reasoning=True)
    assert inline == ("", "<think>\nHm.\n</think>", [ADD])


def test_a_call_is_told_as_soon_as_it_is_complete() -> None:
    parser = ReplyParser(thinking=False, tools=TOOLS)
    assert parser.feed(CALL[:-1]) == []
    [call] = parser.feed(CALL[-1] + " x")[:1]
    assert isinstance(call, ToolCall)
    assert (call.index, call.name, call.arguments) == (0, "add", '{"a": 1}')
    assert call.id.startswith("call_")


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


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
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
    options = {"thinking": thinking, "inline_reasoning": inline, "tools": tools}
    places = sorted(cut % (len(text) + 1) for cut in cuts)
    pieces = [text[start:end] for start, end in pairwise([0, *places, len(text)])]
    whole = parse([text], **options)
    assert parse(pieces, **options) == whole
    assert parse(text, **options) == whole


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=replies, thinking=st.booleans())
def test_nothing_but_tags_and_space_is_lost(text: str, thinking: bool) -> None:
    """Calls aside, every character comes out, in order."""
    reasoning, content, calls = parse([text], thinking=thinking, tools=TOOLS)
    if calls:
        return
    left = text.lstrip().removeprefix("<think>") if thinking else text
    if thinking and "<tool_call>" not in left.partition("</think>")[0]:
        left = left.replace("</think>", "", 1)
    assert "".join((reasoning + content).split()) == "".join(left.split())
