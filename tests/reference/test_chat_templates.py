"""The bundled chat templates against the official one in llama.cpp's sources, on random conversations."""

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_serve.bench.servers.builds import llama_cpp_sources
from tests.chat_templates.cases import ERRORS, HISTORIES, PROMPTS, Case

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parents[2]

# What templates look for, and what they might confuse with it.
FRAGMENTS = [
    "a",
    " ",
    "\n",
    "\t",
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
    "<tool_call>",
]
FRAGMENTS += ["<|im_end|>", "é中", "&<'\"", "image", "text", "video", "{}", "\\n"]

texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=6).map("".join)
scalars = texts | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
parts = (
    st.fixed_dictionaries({"type": st.just("text"), "text": texts})
    | st.sampled_from(["image", "video", "image_url", "sound"]).map(lambda kind: {"type": kind})
    | st.sampled_from(["image", "video", "image_url", "text"]).flatmap(
        lambda key: st.fixed_dictionaries({key: scalars})
    )
    | scalars
)
contents = texts | st.lists(parts, max_size=3) | st.none() | values
functions = st.fixed_dictionaries(
    {"name": texts | scalars}, optional={"arguments": st.dictionaries(texts, values, max_size=3) | values}
)
calls = functions | st.fixed_dictionaries({"type": st.just("function"), "function": functions})


def message(role: str) -> st.SearchStrategy[dict[str, Any]]:
    optional: dict[str, st.SearchStrategy[Any]] = {"content": texts | contents}
    if role == "assistant":
        optional["reasoning_content"] = texts | scalars
        optional["tool_calls"] = st.lists(calls, max_size=3) | values
    return st.fixed_dictionaries({"role": st.just(role)}, optional=optional)


roles = st.sampled_from(["user"] * 6 + ["assistant"] * 6 + ["tool"] * 4 + ["system", "robot"])
turns = st.lists(roles.flatmap(message), max_size=6)
conversations = st.tuples(st.lists(message("system"), max_size=1), turns).map(lambda pair: pair[0] + pair[1])
variables = st.fixed_dictionaries(
    {"messages": conversations, "add_generation_prompt": st.booleans()},
    optional={
        "tools": st.lists(values, max_size=2) | values,
        "enable_thinking": st.sampled_from([True, False, None, 0, 1]),
        "add_vision_id": st.booleans(),
    },
)


@cache
def compile_template(path: Path) -> Any:
    """The template as transformers compiles it."""
    compile_jinja = pytest.importorskip("transformers.utils.chat_template_utils")._compile_jinja_template  # noqa: SLF001 - transformers has no other
    return compile_jinja(path.read_text())


def official() -> Any:
    return compile_template(llama_cpp_sources() / "models" / "templates" / "Qwen3.5-4B.jinja")


def ours(name: str) -> Any:
    return compile_template(ROOT / "chat_templates" / f"{name}.jinja")


def outcome(template: Any, variables: dict[str, Any]) -> str | tuple[type[Exception], str]:
    """The text, or the error, with its message if the template raised it."""
    try:
        text: str = template.render(**variables)
    except Exception as error:
        return type(error), str(error) if type(error) is jinja2.TemplateError else ""
    return text


@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(variables)
def test_any_conversation(variables: dict[str, Any]) -> None:
    assert outcome(ours("qwen3_5"), variables) == outcome(official(), variables)


@settings(max_examples=500, suppress_health_check=list(HealthCheck))
@given(variables)
def test_no_think_is_the_official_one_with_thinking_off(variables: dict[str, Any]) -> None:
    assert outcome(ours("qwen_no_think"), variables) == outcome(
        official(), {**variables, "enable_thinking": False}
    )


@pytest.mark.parametrize("case", [*PROMPTS, *HISTORIES, *ERRORS], ids=str)
def test_expected_strings_are_the_official_ones(case: Case) -> None:
    prompt = {"add_generation_prompt": case in PROMPTS}
    expected = (jinja2.TemplateError, case.error) if case.error else case.text
    assert outcome(official(), {"messages": case.messages, **prompt, **case.variables}) == expected
