"""The text that the bundled templates render, byte for byte."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.server.chat import PromptError
from qwen_serve.server.chat.template import ChatTemplate
from tests.chat_templates.cases import ERRORS, HISTORIES, PROMPTS, Case

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "chat_templates"
NAMES = ("qwen3_5", "qwen_no_think")


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text())


def render(name: str, case: Case, **variables: Any) -> str:
    return template(name).render({"messages": case.messages, **case.variables, **variables}, {})


def test_nano_brings_the_servers_own() -> None:
    own = (ROOT / "models" / "nano" / "chat_template.jinja").read_bytes()
    assert own == (TEMPLATES / "qwen3_5.jinja").read_bytes()


@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_prompt(case: Case) -> None:
    assert render("qwen3_5", case, add_generation_prompt=True) == case.text


@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_no_think_always_closes_the_block(case: Case) -> None:
    expected = case.text.partition("<think>")[0] + "<think>\n\n</think>\n\n"
    assert render("qwen_no_think", case, add_generation_prompt=True) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", HISTORIES, ids=str)
def test_history(name: str, case: Case) -> None:
    assert render(name, case) == case.text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_error(name: str, case: Case) -> None:
    with pytest.raises(PromptError) as error:
        render(name, case)
    assert str(error.value) == f"messages: {case.error}"


def test_the_two_differ_in_their_heading_and_last_step_only() -> None:
    thinking, plain = ((TEMPLATES / f"{name}.jinja").read_text().split("{#-", 2)[2] for name in NAMES)
    last = "{%- if add_generation_prompt -%}"
    assert thinking.partition(last)[0] == plain.partition(last)[0]


def test_nano_carries_the_template() -> None:
    bundled = (ROOT / "models" / "nano" / "chat_template.jinja").read_bytes()
    assert bundled == (TEMPLATES / "qwen3_5.jinja").read_bytes()
