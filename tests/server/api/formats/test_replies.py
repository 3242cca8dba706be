"""What a model writes, as the clients of each format get it, streamed and whole."""

from typing import Any

import pytest

from qwen_serve.server.chat.markup import MARK
from tests.server.api.conftest import Start
from tests.server.api.fakes import FakeVocab
from tests.server.api.formats.wires import FORMATS, ask, results_of
from tests.server.chat.test_drifts import DRIFTS, LIMIT, PATH, TOOLS, call, tokens

USER = [{"role": "user", "content": "Hi"}]
FUNCTIONS = [tool["function"] for tool in TOOLS]
HM = "Hm.\n</think>\n\n"
"""name: reply, thinking, options; reasoning, content, calls, end."""
CASES: dict[str, tuple[str, bool, dict[str, Any], tuple[str, str, list[Any], str]]] = {
    "a quoted </think>": (
        "The user wrote ⟦</think>⟧.\n</think>\n\nYes.",
        True,
        {},
        ("The user wrote </think>.", "Yes.", [], "stop"),
    ),
    "a mentioned <tool_call>": (
        "A <tool_call> tag. No call.\n</think>\n\nYes.",
        True,
        {},
        ("A <tool_call> tag. No call.", "Yes.", [], "stop"),
    ),
    "a quoted call": (
        f"{HM}So:\n⟦{call('<function=read>', *PATH, '</function>')}⟧\nOK.",
        True,
        {},
        ("Hm.", f"So:\n{call('<function=read>', *PATH, '</function>')}\nOK.", [], "stop"),
    ),
    "a stop string in the reasoning": (
        "Question: 9?\n</think>\n\nNine. Question: more",
        True,
        {"stop": ["Question:"]},
        ("Question: 9?", "Nine. ", [], "stop"),
    ),
    "a stop string in a call": (
        call("<function=read>", "<parameter=path>", "Question: a", "</parameter>", "</function>"),
        False,
        {"stop": ["Question:"]},
        ("", "", [("read", {"path": "Question: a"})], "calls"),
    ),
    "a call without an end": (
        call("<function=read>", "<parameter=path>", "a.m").removesuffix("\n</tool_call>"),
        False,
        {},
        ("", "", [("read", None)], "length"),
    ),
    "a think block although thinking is off": (
        "<think>\nHm.\n</think>\n\nYes.",
        False,
        {},
        ("Hm.", "Yes.", [], "stop"),
    ),
    "a second think block": (
        "A\n</think>\n\n<think>\nB\n</think>\n\nYes.",
        True,
        {},
        ("A\n\nB", "Yes.", [], "stop"),
    ),
    "a lone </think>": ("</think>\n\nYes.", False, {}, ("", "Yes.", [], "stop")),
    "an end within the reasoning": ("Hm, 3 or", True, {}, ("Hm, 3 or", "", [], "length")),
    "a lone </tool_call> at the end": ("Done.\n</tool_call>", False, {}, ("", "Done.", [], "stop")),
    "a lone </tool_call> first": ("</tool_call>\n\nDone.", False, {}, ("", "Done.", [], "stop")),
    "a second </tool_call>": (
        call("<function=read>", *PATH, "</function>") + "\n</tool_call>",
        False,
        {},
        ("", "", [("read", {"path": "a.md"})], "calls"),
    ),
    "a mentioned </tool_call>": (
        "It ends with </tool_call> then.",
        False,
        {},
        ("", "It ends with </tool_call> then.", [], "stop"),
    ),
    **{
        f"drift: {name}": (text, False, {}, ("", "", calls, "calls"))
        for name, (text, calls) in DRIFTS.items()
    },
}


def ids(text: str) -> list[int | Exception]:
    """The reply's tokens; what stands between the brackets is spelled in plain ones."""
    vocab, found = FakeVocab(), list[int | Exception]()
    for index, part in enumerate(tokens(text).split(MARK)):
        tag = next((one for one in vocab.added_tokens if index and ("<" + part).startswith(one)), "")
        found += vocab.tokenize(tag, special=True)
        found += part[len(tag) - 1 :].encode() if tag else part.encode()
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_what_models_write(start: Start, form: str, stream: bool) -> None:
    said = [""]
    server = start(lambda _: ids(said[0]))
    for name, (said[0], thinking, options, (reasoning, content, calls, end)) in CASES.items():
        answer = ask(server, form, USER, functions=FUNCTIONS, thinking=thinking, stream=stream, **options)
        assert (answer.reasoning, answer.content, answer.ended) == (reasoning, content, end), name
        if end != "length":
            assert answer.calls == calls, name
        elif form != "ollama":  # which has no place for a cut call
            assert [called for called, _ in answer.calls] == [called for called, _ in calls], name
        assert answer.calls or not calls or form == "ollama", name
        followed = [*USER, *answer.raw, *results_of(form, answer), *USER]
        ask(server, form, followed, functions=FUNCTIONS, thinking=thinking, stream=stream)
        prompt = server.engine.submissions[-1].text
        for called, _ in answer.calls:
            assert f"<function={called}>" in prompt, name


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_cut_anywhere_is_taken_back(start: Start, form: str, stream: bool) -> None:
    """Its text and the arguments that were sent are in the next prompt."""
    reply = "Well.\n" + call("<function=read>", *PATH, *LIMIT, "</function>")
    server = start(lambda _: ids(reply))
    for limit in range(8, len(ids(reply)), 1 if form == "chat" else 7):
        answer = ask(server, form, USER, functions=FUNCTIONS, stream=stream, limit=limit)
        assert answer.ended in ("length", "calls")
        if form == "messages" and stream and answer.calls and isinstance(answer.calls[0][1], str):
            answer.raw[0]["content"][-1]["input"] = answer.calls[0][1]
        ask(server, form, [*USER, *answer.raw, *results_of(form, answer), *USER], functions=FUNCTIONS)
        prompt = server.engine.submissions[-1].text
        assert "Well." in prompt
        assert "<parameter=path>\na" in prompt or limit < reply.index("md") or form == "ollama"


def test_a_request_may_end_the_reasoning_itself(start: Start) -> None:
    server = start(lambda _: ids("Hm.</think>\n\nYes."))
    end = FakeVocab().tokenize("</think>", special=True)
    choice = server.chat(enable_thinking=True, stop_token_ids=end).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["finish_reason"] == "stop"


def test_ids() -> None:
    assert ids("⟦<think>⟧") == list(b"<think>")
    assert ids("a<think>b") == [ord("a"), 256 + FakeVocab.added_tokens.index("<think>"), ord("b")]
