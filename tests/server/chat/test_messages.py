"""Conversations that are refused, and the rendering of others."""

from typing import Any

import pytest

from qwen_serve.server.chat import Prompter, PromptError
from qwen_serve.server.chat.messages import check_messages, check_tools, separate_reasoning
from tests.messages import assistant, system
from tests.server.chat.conftest import TEMPLATE

USER = {"role": "user", "content": "Hi"}


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("Hi", "messages"),
        ([], "messages"),
        (["Hi"], "messages[0]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "Hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
        ([USER, {"role": "system", "content": None}], "messages[1].content"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "Hi"}}], "messages[0].content"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([USER, assistant("", reasoning=1)], "messages[1].reasoning"),
        ([USER, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls"),
        ([USER, {"role": "assistant", "tool_calls": ["f"]}], "messages[1].tool_calls[0]"),
        ([USER, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].function"),
        ([USER, call(arguments="{}")], "messages[1].tool_calls[0].function.name"),
        ([USER, call(name="f", arguments=[1])], "messages[1].tool_calls[0].function.arguments"),
    ],
)
def test_a_bad_message_is_named(messages: Any, param: str) -> None:
    with pytest.raises(PromptError) as error:
        check_messages(messages)
    assert error.value.param == param
    assert param.rpartition(".")[2].split("[")[0] in str(error.value)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        (["f"], "tools[0]"),
        ([{}], "tools[0].function"),
        ([{"function": {"name": "f"}}, {"function": {"name": ""}}], "tools[1].function.name"),
        ([{"function": {"name": "a>b"}}], "tools[0].function.name"),
        ([{"function": {"name": "a\nb"}}], "tools[0].function.name"),
        ([{"function": {"name": " f"}}], "tools[0].function.name"),
        ([{"function": {"name": "f", "parameters": "{}"}}], "tools[0].function.parameters"),
    ],
)
def test_a_bad_tool_is_named(tools: Any, param: str) -> None:
    with pytest.raises(PromptError) as error:
        check_tools(tools)
    assert error.value.param == param


def test_no_tools() -> None:
    assert check_tools(None) is None
    assert check_tools([]) is None


def test_messages_are_brought_to_the_templates_shape() -> None:
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
        {"role": "assistant", "reasoning": "Hm.", "tool_calls": None},
        call(name="f", arguments='{"a": 1}'),
        call(name="f", arguments=""),
        {"role": "tool", "content": None, "tool_call_id": "1"},
    ]
    function = {"name": "f", "arguments": {"a": 1}}
    assert check_messages(given) == [
        system("Be brief."),
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm."},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {**function, "arguments": {}}}],
        },
        {"role": "tool", "content": None, "tool_call_id": "1"},
    ]
    assert given[0]["role"] == "developer", "the caller's objects stay as they are"


def test_system_messages_become_one_at_the_beginning() -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    given = [system("Be brief."), USER, {"role": "developer", "content": parts}, system("Rhyme.")]
    assert check_messages(given) == [system("Be brief.\n\nBe kind.\n\nRhyme."), USER]
    assert check_messages([USER, given[2]]) == [system("Be kind."), USER]
    alone = [{"role": "system", "content": parts}, USER]
    assert check_messages(alone) == alone


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("no tags", None),
        ("<think>not closed", None),
        ("<think>\n\na \n</think>\n\n b", ("a ", " b")),
        ("a</think>b", ("a", "b")),
        ("x<think>a</think>b</think>\nc\n", ("a", "c")),
    ],
)
def test_inline_reasoning(text: str, parts: tuple[str, str] | None) -> None:
    assert separate_reasoning(text) == parts


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"messages": [USER], "template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [USER], "template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs"),
    ],
)
def test_what_the_template_refuses(prompter: Prompter, request_: dict[str, Any], param: str) -> None:
    with pytest.raises(PromptError) as error:
        prompter.chat(**request_)
    assert error.value.param == param


def test_a_bottomless_request_is_refused(prompter: Prompter) -> None:
    arguments: dict[str, Any] = {}
    for _ in range(100_000):
        arguments = {"a": arguments}
    with pytest.raises(PromptError, match="nested too deeply"):
        prompter.chat([USER, call(name="f", arguments=arguments)])


def test_a_broken_template() -> None:
    with pytest.raises(PromptError, match=r"does not compile.*line 2") as error:
        Prompter(StubVocab(), "\n{% if %}")  # type: ignore[arg-type]
    assert error.value.param == "chat_template"


class StubVocab:
    added_tokens = ("<think>",)
    bos_id = 1

    def tokenize(self, text: str, *, special: bool, check: object = None) -> list[int]:
        return [ord(character) for character in text]


def test_a_template_that_trips(prompter: Prompter) -> None:
    broken = Prompter(StubVocab(), "{{ messages[0].content + 1 }}")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="can not render"):
        broken.chat([USER])


def test_beginning_of_sequence_comes_once() -> None:
    """It is added if the vocabulary requires it and the template does not write it."""
    assert Prompter(StubVocab(), "a").chat([USER]) == [1, ord("a")]  # type: ignore[arg-type]
    assert Prompter(StubVocab(), "\x01a").chat([USER]) == [1, ord("a")]  # type: ignore[arg-type]
    assert Prompter(StubVocab(), "").raw("a") == [1, ord("a")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "can_think"),
    [
        (TEMPLATE.read_text(), True),
        (TEMPLATE.with_name("qwen_no_think.jinja").read_text(), False),
        ("{{ messages[0].content }}", False),
        ("{{ raise_exception('<think> needs more') }}", True),
    ],
)
def test_whether_a_template_can_think(source: str, can_think: bool) -> None:
    assert Prompter(StubVocab(), source).can_think == can_think  # type: ignore[arg-type]


def test_raw_text_parses_special_tokens_and_adds_none(prompter: Prompter) -> None:
    ids = prompter.raw("<|im_start|>user\n")
    assert ids == prompter.chat([{"role": "user", "content": "x"}])[: len(ids)]


def test_parts_that_come_back_from_openais_apis_are_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b", "annotations": []}]
    [user, reply] = check_messages(
        [{"role": "user", "content": parts}, assistant({"type": "refusal", "refusal": "No."})]
    )
    assert user["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert reply["content"] == [{"type": "text", "text": "No."}]
    for wrong in ({"type": "refusal", "text": "No."}, {"type": ["text"], "text": "a"}):
        with pytest.raises(PromptError) as caught:
            check_messages([assistant(wrong)])
        assert caught.value.param is not None
        assert caught.value.param.startswith("messages[0].content[0].")


def test_the_text_of_a_refusal_is_the_answers() -> None:
    """OpenAI's chat answers have it beside a content that is null."""
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert check_messages([USER, refused])[1] == assistant("No.")
    answered = assistant("Yes.", refusal=None)
    assert check_messages([USER, answered])[1] == assistant("Yes.")


def test_what_an_assistants_message_cannot_have() -> None:
    check_messages([assistant("x", audio=None)])
    with pytest.raises(PromptError) as caught:
        check_messages([USER, {"role": "assistant", "content": None, "audio": {"id": "a"}}])
    assert caught.value.param == "messages[1].audio"


def asked(*ids: str | None) -> dict[str, Any]:
    calls = [{"id": id_, "type": "function", "function": {"name": "f", "arguments": {}}} for id_ in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def results(*ids: object) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": str(id_), "tool_call_id": id_} for id_ in ids]


@pytest.mark.parametrize(
    ("calls", "given", "read"),
    [
        ("abc", "cab", "abc"),
        ("abc", "cb", "bc"),
        ("abc", "abc", "abc"),
        ("abc", "cxa", "cxa"),
        ("aab", "ba", "ba"),
        ("abc", "bab", "bab"),
        ([None, "b"], "ba", "ba"),
        ("ab", [["b"], "a"], [["b"], "a"]),
    ],
)
def test_tool_results_are_read_in_the_order_of_their_calls(calls: Any, given: Any, read: Any) -> None:
    """Qwen's template writes no ids, so the model takes the first result for that of the first call."""
    messages = [USER, asked(*calls), *results(*given), asked(*calls), USER, *results(*given)]
    there = [*messages[:2], *results(*read), *messages[2 + len(given) :]]
    assert check_messages(messages) == there
    assert check_messages(results(*given)) == results(*given)


def test_a_wrong_result_is_named_by_its_own_place() -> None:
    given = [USER, asked("a", "b"), *results("b", "a")]
    given[2]["content"] = 5
    with pytest.raises(PromptError) as caught:
        check_messages(given)
    assert caught.value.param == "messages[2].content"
