"""JSON schemas: the texts that their grammars allow."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from qwen_serve.server.chat.formats import compose, json_format
from tests.server.chat.test_structural_tags import tokenizer

VALUE: Any = {"a": [1, {"b": "  \n\n\n  "}], "c": {}}


def allowed(text: str, **how: Any) -> bool:
    """Whether the grammar allows a text as a complete document."""
    matcher = LLMatcher(tokenizer(), compose(json_format({}, "schema", **how), thinking=False), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    wanted = list(text.encode())
    return matcher.try_consume_tokens(wanted) == len(wanted) and bool(matcher.is_accepting())


@pytest.mark.parametrize("indent", [None, 0, 2, 6, "\t"])
def test_usual_styles(indent: int | str | None) -> None:
    assert allowed(json.dumps(VALUE, indent=indent))
    assert allowed(json.dumps(VALUE, indent=indent, separators=(",", ":")))


@pytest.mark.parametrize("space", ["", " ", "\n", "\n\n", "\n" + " " * 20, "\n\n" + "\t" * 20])
def test_white_space_that_may_be(space: str) -> None:
    assert allowed(f'{{"a":{space}1,{space}"b":{space}[]{space}}}')


@pytest.mark.parametrize("space", ["  ", "\n\n\n", "\n" + " " * 21, "\t"])
def test_white_space_has_an_end(space: str) -> None:
    """Otherwise a small model would fill its answer with white space."""
    assert not allowed(f'{{"a":{space}1}}')
    assert allowed(f'{{"a":{space}1}}', white_space=r"\s+")
    assert not allowed('{"a": 1}', flexible=False)
