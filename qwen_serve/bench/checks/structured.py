"""Structured output, forced tool calls, and thinking budgets."""

import json
import re
from typing import Any

from qwen_serve.bench.checks.base import COMPLETIONS, INVOCATIONS, MESSAGES, PROMPT, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "travel", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stay", "parameters": {"type": "object", "properties": {}}}},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}
JSON: tuple[dict[str, Any], ...] = (
    {"response_format": FORMAT},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"json_schema": SCHEMA},
    {"json_schema": json.dumps(SCHEMA)},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
)
THINKING: tuple[dict[str, Any], ...] = ({}, {"thinking": True, "thinking_budget": 16})
CODE = r"[ab]{2}-[0-9]"
OTHERS: tuple[dict[str, Any], ...] = (
    {"guided_regex": CODE},
    {"structured_outputs": {"regex": CODE}},
    {"regex": CODE},
    {"ebnf": 'root ::= [ab] [ab] "-" [0-9]'},
    {"grammar": 'root ::= [ab] [ab] "-" [0-9]'},
    {"guided_grammar": 'start: /[ab]{2}/ "-" /[0-9]/'},
    {"guided_choice": ["aa-1", "bb-2"]},
    {"structured_outputs": {"choice": ["aa-1", "bb-2"]}},
)
ODD = ["no, never", 'a "quoted" \\ word']


def _trip(text: str) -> None:
    value = json.loads(text)
    equal(sorted(value), ["city", "days"], "keys")
    expect(value["city"] in ("Rome", "Oslo") and 1 <= value["days"] <= 9, f"{value} is not of the schema")


@check("a JSON schema is followed, in every spelling, on every endpoint, with and without thinking")
async def schema(target: Target) -> None:
    for fields in JSON:
        for more in THINKING:
            answer = await target.chat(max_tokens=300, temperature=1.0, **fields, **more)
            _trip(answer["choices"][0]["message"]["content"])
    answer = await target.ask(COMPLETIONS, prompt=PROMPT, max_tokens=200, temperature=1.0, guided_json=SCHEMA)
    _trip(answer["choices"][0]["text"])
    answer = await target.ask(INVOCATIONS, messages=MESSAGES, max_tokens=200, response_format=FORMAT)
    _trip(answer["choices"][0]["message"]["content"])


@check("regular expressions, choices and grammars are followed")
async def others(target: Target) -> None:
    for fields in OTHERS:
        answer = await target.chat(max_tokens=50, temperature=1.0, **fields)
        text = answer["choices"][0]["message"]["content"]
        expect(re.fullmatch(CODE, text) is not None, f"{fields}: {text!r}")
        equal(answer["choices"][0]["finish_reason"], "stop", "finish_reason")
    text = (await target.chat(temperature=1.0, guided_choice=ODD))["choices"][0]["message"]["content"]
    expect(text in ODD, f"guided_choice: {text!r}")


TAG = {
    "type": "tag",
    "begin": "<trip>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</trip>",
}
ONCE = {
    "type": "triggered_tags",
    "triggers": ["<trip>"],
    "tags": [TAG],
    "at_least_one": True,
    "stop_after_first": True,
}
OLD = {"structures": [{"begin": "<trip>", "schema": SCHEMA, "end": "</trip>"}], "triggers": ["<trip>"]}


@check("structural tags: a tag follows its schema, free text has no unfinished one")
async def structural_tags(target: Target) -> None:
    wanted = {"type": "structural_tag", "format": ONCE}
    for fields in (
        {"response_format": wanted},
        {"structured_outputs": {"structural_tag": json.dumps(wanted)}},
        {"structured_outputs": {"structural_tag": {"format": TAG}}},
        {"structural_tag": {"type": "structural_tag", "format": TAG}},
    ):
        for more in THINKING:
            answer = await target.chat(max_tokens=300, temperature=1.0, **fields, **more)
            text = answer["choices"][0]["message"]["content"]
            expect(text.startswith("<trip>") and text.endswith("</trip>"), f"{fields}: {text!r}")
            _trip(text.removeprefix("<trip>").removesuffix("</trip>"))
    free = {"type": "structural_tag", **OLD}
    answer = await target.chat(max_tokens=40, temperature=1.0, response_format=free)
    expect(isinstance(answer["choices"][0]["message"]["content"], str), "no text")


@check("tool_choice forces a call: required, any, by name, of those allowed; arguments follow the schema")
async def forced(target: Target) -> None:
    named: dict[str, Any] = {"type": "function", "function": {"name": "travel"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in ("required", "any", named, {"type": "function", "name": "travel"}, allowed):
        answer = await target.chat(
            max_tokens=300, temperature=1.0, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
        )
        equal(answer["choices"][0]["finish_reason"], "tool_calls", "finish_reason")
        [call] = answer["choices"][0]["message"]["tool_calls"]
        if isinstance(choice, dict) or call["function"]["name"] == "travel":
            equal(call["function"]["name"], "travel", "name")
            _trip(call["function"]["arguments"])


@check("a thinking budget ends the thoughts, in every spelling, and the model answers")
async def budget(target: Target) -> None:
    spellings: tuple[dict[str, Any], ...] = (
        {"thinking_budget": 4},
        {"thinking_token_budget": 4},
        {"reasoning_budget": 4},
        {"thinking_budget_tokens": 4},
        {"reasoning_budget_tokens": 4},
        {"thinking": {"type": "enabled", "budget_tokens": 4}},
    )
    for fields in spellings:
        answer = await target.chat(max_tokens=200, **fields)
        message = answer["choices"][0]["message"]
        expect(message.get("reasoning_content"), f"{fields}: no reasoning_content")
        expect(len(message["reasoning_content"]) < 300, f"{fields}: {message['reasoning_content']!r}")
        expect((message["content"] or "").strip(), f"{fields}: no answer")
