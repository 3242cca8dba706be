"""Conversations with the exact text that Qwen3.5's template renders."""

from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any


@dataclass(frozen=True)
class Case:
    """`variables` of a template, and the expected text or error message."""

    name: str
    messages: list[dict[str, Any]]
    text: str = ""
    error: str = ""
    variables: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Température in °C, "now" & <later>',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

TOOLS_TEXT = """\
<|im_start|>system
# Tools

You have access to the following functions:

<tools>
{"type": "function", "function": {"name": "weather", "description": "Température in °C, \\"now\\" & \
<later>", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be \
nested within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function \
call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and \
do not tell the user about function calls
</IMPORTANT>"""


def _text(indented: str) -> str:
    return dedent(indented).lstrip("\n")


def _user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


HI = "<|im_start|>user\nHi<|im_end|>\n"
THINK = "<|im_start|>assistant\n<think>\n"
NO_THINK = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

# The last turn opens a reply: what follows depends on the template and on enable_thinking.
PROMPTS = [
    Case("thinking absent", [_user()], HI + THINK),
    Case("thinking on", [_user()], HI + THINK, variables={"enable_thinking": True}),
    Case("thinking off", [_user()], HI + NO_THINK, variables={"enable_thinking": False}),
    Case("only false is off", [_user()], HI + THINK, variables={"enable_thinking": None}),
    Case("zero is not false", [_user()], HI + THINK, variables={"enable_thinking": 0}),
]

# Rendered without a generation prompt: both templates agree.
HISTORIES = [
    Case(
        "a system message, trimmed",
        [{"role": "system", "content": "\n Be brief. \n"}, _user("  Hi\n")],
        "<|im_start|>system\nBe brief.<|im_end|>\n" + HI,
    ),
    Case(
        "an empty system message is a turn",
        [{"role": "system", "content": ""}, _user()],
        "<|im_start|>system\n<|im_end|>\n" + HI,
    ),
    Case(
        "several turns: earlier reasoning is dropped",
        [
            _user("1+1?"),
            _assistant("2", reasoning_content="One and one."),
            _user("2+2?"),
            _assistant("<think>\nTwo and two.\n</think>\n\n4"),
            _user("3+3?"),
        ],
        _text("""
            <|im_start|>user
            1+1?<|im_end|>
            <|im_start|>assistant
            2<|im_end|>
            <|im_start|>user
            2+2?<|im_end|>
            <|im_start|>assistant
            4<|im_end|>
            <|im_start|>user
            3+3?<|im_end|>
            """),
    ),
    Case(
        "the last reply keeps reasoning from its field",
        [_user(), _assistant("Hello.", reasoning_content="\n A greeting. \n")],
        HI + "<|im_start|>assistant\n<think>\nA greeting.\n</think>\n\nHello.<|im_end|>\n",
    ),
    Case(
        "the last reply keeps inline reasoning",
        [_user(), _assistant("<think>\nA greeting.\n</think>\n\n  Hello.")],
        HI + "<|im_start|>assistant\n<think>\nA greeting.\n</think>\n\n  Hello.<|im_end|>\n",
    ),
    Case(
        "inline reasoning without its opening tag, and closed twice",
        [_user(), _assistant("A</think>B<think>C</think>\nD")],
        HI + "<|im_start|>assistant\n<think>\nA\n</think>\n\nD<|im_end|>\n",
    ),
    Case(
        "a reasoning field leaves inline tags alone",
        [_user(), _assistant("<think>x</think>y", reasoning_content="r")],
        HI + "<|im_start|>assistant\n<think>\nr\n</think>\n\n<think>x</think>y<|im_end|>\n",
    ),
    Case(
        "no reasoning: an empty block",
        [_user(), _assistant(None)],
        HI + "<|im_start|>assistant\n<think>\n\n</think>\n\n<|im_end|>\n",
    ),
    Case("tools", [_user()], TOOLS_TEXT + "<|im_end|>\n" + HI, variables={"tools": [WEATHER]}),
    Case(
        "tools and a system message",
        [{"role": "system", "content": "Be brief."}, _user()],
        TOOLS_TEXT + "\n\nBe brief.<|im_end|>\n" + HI,
        variables={"tools": [WEATHER]},
    ),
    Case(
        "tools and an empty system message",
        [{"role": "system", "content": " "}, _user()],
        TOOLS_TEXT + "<|im_end|>\n" + HI,
        variables={"tools": [WEATHER]},
    ),
    Case("no tools in the list", [_user()], HI, variables={"tools": []}),
    Case(
        "calls and results",
        [
            _user("Weather?"),
            _assistant(
                "Looking.",
                reasoning_content="Two cities.",
                tool_calls=[
                    _call("weather", {"city": "Bonn"}),
                    _call("weather", {"city": "Bern", "days": 2}),
                ],
            ),
            {"role": "tool", "content": "21 °C"},
            {"role": "tool", "content": [{"type": "text", "text": "19 "}, {"type": "text", "text": "°C"}]},
            _assistant("Warm.", reasoning_content="Both are warm."),
        ],
        _text("""
            <|im_start|>user
            Weather?<|im_end|>
            <|im_start|>assistant
            <think>
            Two cities.
            </think>

            Looking.

            <tool_call>
            <function=weather>
            <parameter=city>
            Bonn
            </parameter>
            </function>
            </tool_call>
            <tool_call>
            <function=weather>
            <parameter=city>
            Bern
            </parameter>
            <parameter=days>
            2
            </parameter>
            </function>
            </tool_call><|im_end|>
            <|im_start|>user
            <tool_response>
            21 °C
            </tool_response>
            <tool_response>
            19 °C
            </tool_response><|im_end|>
            <|im_start|>assistant
            <think>
            Both are warm.
            </think>

            Warm.<|im_end|>
            """),
    ),
    Case(
        "argument values: objects and lists are JSON, the rest plain",
        [
            _user("Go"),
            _assistant(
                None,
                tool_calls=[
                    _call("f", {"o": {"k": "ü<&"}, "l": [1, None], "t": True, "n": None, "x": 1.5, "e": ""})
                ],
            ),
        ],
        _text("""
            <|im_start|>user
            Go<|im_end|>
            <|im_start|>assistant
            <think>

            </think>

            <tool_call>
            <function=f>
            <parameter=o>
            {"k": "ü<&"}
            </parameter>
            <parameter=l>
            [1, null]
            </parameter>
            <parameter=t>
            True
            </parameter>
            <parameter=n>
            None
            </parameter>
            <parameter=x>
            1.5
            </parameter>
            <parameter=e>

            </parameter>
            </function>
            </tool_call><|im_end|>
            """),
    ),
    Case(
        "a call without its wrapper and without arguments",
        [_user(), _assistant("", tool_calls=[{"name": "now"}])],
        HI + NO_THINK + "<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>\n",
    ),
    Case(
        "a user message that is a tool result is no question",
        [_user(), _assistant("a", reasoning_content="r"), _user("<tool_response>\n1\n</tool_response>")],
        HI
        + "<|im_start|>assistant\n<think>\nr\n</think>\n\na<|im_end|>\n"
        + "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n",
    ),
    Case(
        "pictures and clips are placeholders",
        [
            _user(
                [
                    {"type": "image_url", "image_url": {"url": "data:,"}},
                    {"type": "text", "text": "and"},
                    {"type": "video", "video": "x"},
                    {"image": "y"},
                ]
            )
        ],
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>and"
        "<|vision_start|><|video_pad|><|vision_end|><|vision_start|><|image_pad|><|vision_end|><|im_end|>\n",
    ),
    Case(
        "pictures and clips are numbered on request",
        [_user([{"type": "image"}, {"type": "video"}]), _user([{"type": "image"}])],
        "<|im_start|>user\nPicture 1: <|vision_start|><|image_pad|><|vision_end|>"
        "Video 1: <|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>user\nPicture 2: <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n",
        variables={"add_vision_id": True},
    ),
]

ERRORS = [
    Case("no messages", [], error="No messages provided."),
    Case("unknown role", [_user(), {"role": "robot", "content": ""}], error="Unexpected message role."),
    Case(
        "late system message",
        [_user(), {"role": "system", "content": "x"}],
        error="System message must be at the beginning.",
    ),
    Case("no question", [_assistant("Hi")], error="No user query found in messages."),
    Case(
        "picture in the system message",
        [{"role": "system", "content": [{"type": "image"}]}, _user()],
        error="System message cannot contain images.",
    ),
    Case(
        "clip in the system message",
        [{"role": "system", "content": [{"type": "video"}]}, _user()],
        error="System message cannot contain videos.",
    ),
    Case("unknown part", [_user([{"type": "sound"}])], error="Unexpected item type in content."),
    Case("content of a wrong type", [_user(5)], error="Unexpected content type."),
]
