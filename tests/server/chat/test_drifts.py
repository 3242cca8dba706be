"""What models really write: tags that are tokens or only text, and calls that drifted from their form."""

import re
from typing import Any

import pytest

from qwen_serve.server.chat import Detokenizer, Part, ReplyParser, StopStrings
from qwen_serve.server.chat.markup import Tags, marked, spelled
from tests.server.chat.test_reply import parse

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["path"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "edits": {"type": "array"},
                    "opts": {"type": "object"},
                    "dry": {"type": "boolean"},
                },
            },
        },
    },
]
TAG = re.compile("|".join(Tags()))
EXACT: dict[str, Any] = {"tokens": Tags(), "tools": TOOLS}


def tokens(text: str) -> str:
    """A reply's text in which tags are tokens, except between the brackets."""
    parts = re.split(r"⟦([^⟧]*)⟧", text)
    parts[::2] = [TAG.sub(lambda tag: marked(tag[0]), part) for part in parts[::2]]
    return "".join(parts)


def call(*lines: str) -> str:
    return "\n".join(["<tool_call>", *lines, "</tool_call>"])


READ = ("read", {"path": "a.md"})
FIVE = ("read", {"path": "a.md", "limit": 5})
PATH = ("<parameter=path>", "a.md", "</parameter>")
LIMIT = ("<parameter=limit>", "5", "</parameter>")
EDITS = [{"old": "a", "new": "b's"}]

DRIFTS: dict[str, tuple[str, list[Any]]] = {
    "no drift": (call("<function=read>", *PATH, *LIMIT, "</function>"), [FIVE]),
    "</parameter> missing before </function>": (
        call("<function=read>", "<parameter=path>", "a.md", "</function>"),
        [READ],
    ),
    "</parameter> missing before a parameter": (
        call("<function=read>", *PATH[:2], *LIMIT, "</function>"),
        [FIVE],
    ),
    "</parameter> and </function> missing": (call("<function=read>", *PATH[:2]), [READ]),
    "</function> missing": (call("<function=read>", *PATH), [READ]),
    "</function> and </tool_call> missing": ("\n".join(["<tool_call>", "<function=read>", *PATH]), [READ]),
    "</tool_call> missing": ("\n".join(["<tool_call>", "<function=read>", *PATH, "</function>"]), [READ]),
    "> missing behind a parameter's name": (
        call("<function=read>", "<parameter=path", *PATH[1:], *LIMIT, "</function>"),
        [FIVE],
    ),
    "> missing behind the function's name": (call("<function=read", *PATH, "</function>"), [READ]),
    "> missing in </parameter>": (
        call("<function=read>", *PATH[:2], "</parameter", *LIMIT, "</function>"),
        [FIVE],
    ),
    "</parameter/>": (call("<function=read>", *PATH[:2], "</parameter/>", "</function>"), [READ]),
    "</parameter1>": (call("<function=read>", *PATH[:2], "</parameter1>", *LIMIT, "</function>"), [FIVE]),
    "</parameter_function>": (call("<function=read>", *PATH[:2], "</parameter_function>"), [READ]),
    "> missing in </function>": (call("<function=read>", *PATH, "</function"), [READ]),
    "<tool_call> missing": ("\n".join(["<function=read>", *PATH, "</function>", "</tool_call>"]), [READ]),
    "both tags missing": ("\n".join(["<function=read>", *PATH, "</function>"]), [READ]),
    "<tool_call> twice": ("<tool_call>\n" + call("<function=read>", *PATH, "</function>"), [READ]),
    "two functions in one <tool_call>": (
        call("<function=read>", *PATH, "</function>", "<function=read>", *PATH, *LIMIT, "</function>"),
        [READ, FIVE],
    ),
    "<parameter= in place of <function=": (call("<parameter=read>", *PATH, "</function>"), [READ]),
    "quoted names": (call('<function="read">', '<parameter="path">', *PATH[1:], "</function>"), [READ]),
    "arguments in JSON": (call("<function=read>", '{"path": "a.md", "limit": 5}', "</function>"), [FIVE]),
    "the call in JSON": (call('{"name": "read", "arguments": {"path": "a.md"}}'), [READ]),
    "names in the closing tags": (
        call("<function=read>", *PATH[:2], "</parameter=path>", *LIMIT, "</function=read>"),
        [FIVE],
    ),
    "</function=read> missing its > behind a value": (
        call("<function=read>", *PATH[:2], "</function=read"),
        [READ],
    ),
    "name as an attribute": (
        call(
            '<function name="read">',
            *('<parameter name="path">', *PATH[1:]),
            *('<parameter name="limit">', *LIMIT[1:], "</function>"),
        ),
        [FIVE],
    ),
    "the call in JSON, its arguments as text": (
        call(r'{"name": "read", "arguments": "{\"path\": \"a.md\"}"}'),
        [READ],
    ),
    "a quoted number": (call("<function=read>", *PATH, LIMIT[0], '"5"', *LIMIT[2:], "</function>"), [FIVE]),
    "a tuple, and TRUE": (
        call(
            "<function=edit>",
            *("<parameter=edits>", """({'old': 'a', 'new': "b's"},)""", "</parameter>"),
            *("<parameter=dry>", "TRUE", "</parameter>", "</function>"),
        ),
        [("edit", {"edits": EDITS, "dry": True})],
    ),
    "lists and booleans of Python": (
        call(
            "<function=edit>",
            *("<parameter=edits>", """[{'old': 'a', 'new': "b's"}]""", "</parameter>"),
            *("<parameter=opts>", '{"dry": True, "x": None}', "</parameter>"),
            *("<parameter=dry>", "True", "</parameter>", "</function>"),
        ),
        [("edit", {"edits": EDITS, "opts": {"dry": True, "x": None}, "dry": True})],
    ),
}


@pytest.mark.parametrize(("text", "calls"), DRIFTS.values(), ids=DRIFTS)
@pytest.mark.parametrize("before", ["", "I read.\n\n"])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_call_that_drifted(text: str, calls: list[Any], before: str, thinking: bool) -> None:
    if text.startswith("<function=") and before and not text.endswith("</tool_call>"):
        calls = []  # perhaps an example
    text = tokens(("Hm.\n</think>\n\n" if thinking else "") + before + text)
    content = before.strip() if calls else before + text.partition(before)[2]
    reasoning = "Hm." if thinking else ""
    for pieces in ([text], text):
        found = parse(pieces, thinking=thinking, **EXACT)
        assert found == (reasoning, spelled(content), calls)


@pytest.mark.parametrize("name", [name for name in DRIFTS if DRIFTS[name][0].startswith("<tool_call>")])
def test_a_call_made_in_the_reasoning(name: str) -> None:
    text, calls = DRIFTS[name]
    for end in ("", "\n</think>", "\n</think>\n\n"):
        text_ = tokens(f"Hm.\n{text}{end}")
        for pieces in ([text_], text_):
            if name.endswith("<tool_call> missing") or "</tool_call> missing" in name:
                continue  # what follows is part of the call
            assert parse(pieces, thinking=True, closed=True, **EXACT) == ("Hm.", "", calls)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("The user pasted ⟦</think>⟧. Fine.\n</think>\n\nYes.", "The user pasted </think>. Fine.", "Yes."),
        (
            "Qwen writes a <tool_call> tag first.\n</think>\n\nA tag.",
            "Qwen writes a <tool_call> tag first.",
            "A tag.",
        ),
        ("Some write <function=...>.\n</think>\n\nOK.", "Some write <function=...>.", "OK."),
        ("Hm.\n</think>\n\nSo: ⟦<tool_call>⟧\n<function=read>\n</function>\n⟦</tool_call>⟧\n", "Hm.", None),
        (
            "⟦" + call("<function=read>", *PATH, "</function>") + "⟧\nThat was it.\n</think>\n\nOK.",
            None,
            "OK.",
        ),
    ],
)
def test_a_tag_is_a_token(text: str, reasoning: str | None, content: str | None) -> None:
    marked_text = tokens(text)
    plain = spelled(marked_text)
    if content is None:
        content = plain.partition("</think>\n\n")[2]
    if reasoning is None:
        reasoning = plain.partition("\n</think>")[0]
    for pieces in ([marked_text], marked_text):
        assert parse(pieces, thinking=True, closed=True, **EXACT) == (reasoning, content, [])


def test_a_quoted_call_in_an_argument() -> None:
    example = "⟦" + call("<function=read>", *PATH, "</function>") + "⟧"
    text = tokens(
        call("<function=read>", "<parameter=path>", f"See:\n{example}\nOK", "</parameter>", "</function>")
    )
    for pieces in ([text], text):
        [found] = parse(pieces, thinking=False, **EXACT)[2]
        assert found == ("read", {"path": "See:\n" + example.strip("⟦⟧") + "\nOK"})


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (
            "Here:\n⟦<tool_call>⟧\n<function=read>\n<parameter=path>\nx\n</parameter>\n</function>\n⟦</tool_call>⟧\n",
        )
        * 2,
        ("Write <function=read>.",) * 2,
        ("```\n<function=read>\n</function>\n```\nso.",) * 2,
        ("<function=other>\n</function>\n</tool_call>",) * 2,
    ],
)
def test_text_that_only_looks_like_a_call(text: str, content: str) -> None:
    text = tokens(text)
    for pieces in ([text], text):
        assert parse(pieces, thinking=False, **EXACT) == ("", spelled(text), [])


@pytest.mark.parametrize(
    "text",
    [
        "Well. <tool_call>",
        "<tool_call>\n<function=re",
        "<tool_call>\n<function=read>\n<parameter=path>\na.m",
        "<tool_call>\n<function=read>\n<parameter=limit>\n5\n</parameter>",
        "<tool_call>\n<function=read>\n<parameter=path>\na.md\n</parameter>\n<parameter=limit>\n",
    ],
)
@pytest.mark.parametrize("limited", [False, True])
def test_a_call_that_is_not_complete_is_not_presented_as_one(text: str, limited: bool) -> None:
    parser = ReplyParser(thinking=False, **EXACT)
    parser.feed(tokens(text))
    parser.flush(limited=limited)
    assert (parser.tool_calls, parser.unfinished) == (0, True)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHidden.\n</think>\n\nAnswer.", "Hidden.", "Answer."),
        ("</think>\n\nAnswer.", "", "Answer."),
        ("Sure.</think>\n\nAnswer.", "", "Sure.\n\nAnswer."),
        ("Sure.\n</think>\n\nAnswer.", "", "Sure.\n\nAnswer."),
        ("Answer.</think>", "", "Answer."),
        ("Answer.\n<think>\n", "", "Answer.\n"),
        ("Answer: <think> opens it.", "", "Answer: <think> opens it."),
        ("The tag </think> ends it.", "", "The tag </think> ends it."),
        ("⟦<think>⟧ and ⟦</think>⟧\n", "", "<think> and </think>\n"),
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_closing_tag_that_closes_nothing(text: str, reasoning: str, content: str, tools: Any) -> None:
    text = tokens(text)
    for pieces in ([text], text):
        found = parse(pieces, thinking=False, closed=True, tokens=Tags(), tools=tools)
        assert found == (reasoning, content, [])


class Characters:
    """A vocabulary whose tokens are characters."""

    @staticmethod
    def token_bytes(token: int) -> bytes:
        return chr(token).encode()


@pytest.mark.parametrize(
    ("text", "content", "arguments", "stop"),
    [
        ("Question: what?\n</think>\n\nAn answer.", "An answer.", [], None),
        ("Hm.\n</think>\n\nAn answer. Question: what", "An answer. ", [], "Question:"),
        (
            "Hm.\n</think>\n\nSo:\n"
            + call("<function=read>", "<parameter=path>", "Question: a", "</parameter>", "</function>"),
            "So:",
            [("read", {"path": "Question: a"})],
            None,
        ),
        (
            "Question:</think>Quest" + call("<function=read>", *PATH, "</function>") + "ion: Question:",
            "Quest" + "ion: ",
            [READ],
            "Question:",
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_stop_strings_act_on_the_answer(
    text: str, content: str, arguments: list[Any], stop: str | None, size: int
) -> None:
    ids = [ord(c) if c != marked("<")[0] else 0 for c in tokens(text)]
    text_of = Detokenizer(Characters(), StopStrings(["Question:"]), tags={0: "<"})  # type: ignore[arg-type]
    parser = ReplyParser(thinking=True, stops=text_of.stops, **EXACT)
    parts: list[Part] = []
    for at in range(0, len(ids), size):
        parts += parser.feed(text_of.decode(ids[at : at + size]))
        assert text_of.certain_tokens <= at + size
        if text_of.stop_string:
            break
    text_of.ended = True
    parts += parser.flush()
    assert text_of.stop_string == stop
    joined = "".join(getattr(part, "text", "") for part in parts if type(part).__name__ == "Content")
    assert joined == content
    assert parser.tool_calls == len(arguments)
    if stop:
        assert text_of.completion_tokens == spelled(tokens(text)).rindex("Question:")
    else:
        assert text_of.completion_tokens == len(ids)
