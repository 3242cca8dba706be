"""A prefilled answer: the prompt ends with it, and the model continues it."""

from typing import Any

import pytest

from qwen_serve.server.chat import Prompter, PromptError
from tests.server.chat.conftest import TEMPLATE
from tests.server.chat.test_messages import StubVocab

USER = {"role": "user", "content": "Hi"}
TURN = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def begun(**message: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", **message}]


@pytest.mark.parametrize(
    ("message", "thinking", "end", "reasons"),
    [
        ({"content": "Well, "}, False, "<think>\n\n</think>\n\nWell, ", False),
        ({"content": "Well, "}, True, "<think>\n\n</think>\n\nWell, ", False),
        ({"content": [{"type": "text", "text": "Well"}]}, False, "<think>\n\n</think>\n\nWell", False),
        ({"content": "", "reasoning_content": "Hm"}, False, "<think>\nHm", True),
        ({"content": None, "reasoning": "Hm"}, True, "<think>\nHm", True),
        ({"content": "<think>\nHm, "}, False, "<think>\nHm, ", True),
        ({"content": "Yes", "reasoning_content": "\nHm\n"}, False, "<think>\nHm\n</think>\n\nYes", False),
        ({"content": "<think>\nHm\n</think>\n\nYes"}, True, "<think>\nHm\n</think>\n\nYes", False),
        ({"content": "<think>Hm</think>"}, True, "<think>\nHm\n</think>\n\n", False),
        ({"content": "<think>\n\n</think>\n\n"}, True, "<think>\n\n</think>\n\n", False),
        ({"content": ""}, True, "<think>\n", True),
        ({"content": ""}, False, "<think>\n\n</think>\n\n", False),
    ],
)
def test_the_prompt_ends_where_the_message_does(
    prompter: Prompter, message: dict[str, Any], thinking: bool, end: str, reasons: bool
) -> None:
    options: Any = {"enable_thinking": thinking, "continue_final_message": True}
    assert prompter.render(begun(**message), **options) == TURN + end
    assert prompter.reply_reasons(begun(**message), **options) == reasons


def test_without_it_the_message_is_closed_and_a_new_one_begins(prompter: Prompter) -> None:
    closed = f"{TURN}<think>\n\n</think>\n\nWell<|im_end|>\n"
    assert prompter.render(begun(content="Well")) == f"{closed}<|im_start|>assistant\n<think>\n\n</think>\n\n"
    options: Any = {"add_generation_prompt": False, "enable_thinking": True}
    assert prompter.render(begun(content="Well"), **options) == closed
    assert not prompter.reply_reasons(begun(content="Well"), **options)


def test_it_is_tokenised_as_the_model_would_have_written_it(prompter: Prompter) -> None:
    prompt = prompter.chat([USER])
    assert prompter.chat(begun(content="Well"), continue_final_message=True)[: len(prompt)] == prompt


def test_control_tokens_in_it_are_text(prompter: Prompter) -> None:
    plain = prompter.chat(begun(content="a"), continue_final_message=True)
    marked = prompter.chat(begun(content="<|im_end|>"), continue_final_message=True)
    end = prompter.raw("<|im_end|>")
    assert len(end) == 1
    assert marked.count(end[0]) == plain.count(end[0])


def test_a_template_that_cannot_think_goes_on_with_the_answer() -> None:
    source = TEMPLATE.with_name("qwen_no_think.jinja").read_text()
    prompter = Prompter(StubVocab(), source)  # type: ignore[arg-type]
    messages = begun(content="Yes", reasoning_content="Hm")
    assert prompter.render(messages, continue_final_message=True).endswith(
        "assistant\n<think>\n\n</think>\n\nYes"
    )
    assert not prompter.reply_reasons(messages, enable_thinking=True, continue_final_message=True)


@pytest.mark.parametrize(
    "messages",
    [[USER], begun(content=None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])],
)
def test_only_an_assistants_text_can_be_continued(prompter: Prompter, messages: list[dict[str, Any]]) -> None:
    for ask in (prompter.chat, prompter.reply_reasons):
        with pytest.raises(PromptError, match="must be an assistant's text") as error:
            ask(messages, continue_final_message=True)
        assert error.value.param == "continue_final_message"
