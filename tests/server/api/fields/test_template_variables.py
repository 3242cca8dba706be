"""Variables that newer templates of the family read: reasoning_effort and preserve_thinking."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.api.conftest import TEMPLATE, Start
from tests.server.api.formats.wires import PATHS

HI = [{"role": "user", "content": "Hi"}]
NEWER = """{%- set effort = reasoning_effort|default('xhigh') -%}
{%- if effort not in ('xhigh', 'medium', 'low') -%}{{ raise_exception('Unexpected effort.') }}{%- endif -%}
{{- 'effort ' ~ effort ~ ', keep ' ~ (preserve_thinking is defined and preserve_thinking) ~ '\n' -}}
"""
CHAT: list[tuple[dict[str, Any], str]] = [
    ({}, "effort xhigh"),
    ({"reasoning_effort": "low"}, "effort low"),
    ({"reasoning_effort": "minimal"}, "effort low"),
    ({"reasoning_effort": "high"}, "effort xhigh"),
    ({"reasoning_effort": "max"}, "effort xhigh"),
    ({"reasoning_effort": "none"}, "effort xhigh"),
    ({"reasoning": {"effort": "medium"}}, "effort medium"),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "effort low"),
    ({"preserve_thinking": True}, "keep True"),
    ({"chat_template_kwargs": {"preserve_thinking": True}}, "keep True"),
    ({"preserve_thinking": False}, "keep False"),
]


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    path = tmp_path / "newer.jinja"
    path.write_text(NEWER + TEMPLATE.read_text())
    return path


def test_the_templates_own_variables(start: Start, newer: Path) -> None:
    server = start("Hm.\n</think>\n\nOK", chat_template=newer)

    def prompt(path: str, **body: Any) -> str:
        response = server.post(path, **body)
        assert response.status_code == 200, response.text
        return server.engine.submissions[-1].text

    for fields, expected in CHAT:
        assert expected in prompt(PATHS["chat"], messages=HI, **fields)
    assert "effort low" in prompt(PATHS["responses"], input="Hi", reasoning={"effort": "low"})
    body: dict[str, Any] = {"messages": HI, "max_tokens": 9, "thinking": {"type": "adaptive"}}
    assert "effort medium" in prompt(PATHS["messages"], **body, output_config={"effort": "medium"})
    assert "effort low" in prompt(PATHS["ollama"], messages=HI, think="low", stream=False)
    shown = server.post("/apply-template", messages=HI, reasoning_effort="low").json()["prompt"]
    assert "effort low" in shown
    refused = server.chat(chat_template_kwargs={"reasoning_effort": "high"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs.reasoning_effort"
    assert "low, medium, xhigh" in refused.json()["error"]["message"]


def test_without_them_an_effort_is_a_budget(start_shared: Start) -> None:
    """And what the template does not read has no effect."""
    server = start_shared("Hm.\n</think>\n\nOK")
    plain = server.chat(enable_thinking=True)
    more = server.chat(reasoning_effort="low", preserve_thinking=True, enable_thinking=True)
    assert (plain.status_code, more.status_code) == (200, 200)
    one, other = (entry.text for entry in server.engine.submissions[-2:])
    assert one == other
