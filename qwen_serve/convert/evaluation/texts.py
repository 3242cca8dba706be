"""Writes the evaluation texts that are unlike a model's own: prose, code and chat.

`prose` is `prose.txt`: law, medicine, stories and others, in 17 languages. `code` is Python's own library, as
installed. `chat` has the scenes of `chat.toml`: conversations with tools, calls, results and thinking, in the
model's own template. Calibration, search and compensation never read them.
"""

import json
import random
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, get_args

from qwen_serve.convert.calibration import Purpose, write_text
from qwen_serve.convert.calibration.prompts import ChatTemplate
from qwen_serve.llamacpp.evaluation import Runtime

Kind = Literal["prose", "code", "chat"]

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

TEXTS: Final[tuple[Purpose | Kind, ...]] = ("evaluation", *KINDS)
"""What files are measured on: the model's own text, and those unlike it."""

MODULES: Final = (
    *("textwrap", "heapq", "csv", "shlex", "fractions", "statistics", "sched", "graphlib", "queue"),
    *("calendar", "configparser", "difflib", "netrc", "optparse", "reprlib", "selectors"),
)
CUT: Final = slice(1500, 3500)
"""The characters that are read of each module, after its introduction."""

CONVERSATIONS: Final = 10
SCENES: Final = 3
"""Tools that a conversation offers, each of which is called once."""

SEED: Final = 60221


def write_any(gguf: Path, out: Path, *, purpose: Purpose | Kind, runtime: Runtime) -> None:
    """Writes the model's own text for a purpose, or the text of a kind. Raises what either does."""
    match purpose:
        case "prose" | "code" | "chat":
            write_unlike(gguf, out, kind=purpose, runtime=runtime)
        case _:
            write_text(gguf, out, purpose=purpose, runtime=runtime)


def write_unlike(gguf: Path, out: Path, *, kind: Kind, runtime: Runtime) -> None:
    """Writes the text of this kind; only `chat` depends on the model, by its template.

    Raises:
        ConvertError: the model's template does not work.
        LlamaError: the model cannot be loaded.
    """
    match kind:
        case "prose":
            text = Path(__file__).with_name("prose.txt").read_text(encoding="utf-8")
        case "code":
            text = "\n\n".join(map(_source, MODULES))
        case "chat":
            with runtime.load(gguf) as model:
                template = ChatTemplate.of(model)
            text = "".join(_conversations(template))
    out.write_text(text, encoding="utf-8")


def _source(module: str) -> str:
    """Part of a module of Python's library."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, "a module of Python's library"
    return Path(spec.origin).read_text(encoding="utf-8")[CUT]


def _conversations(template: ChatTemplate) -> list[str]:
    data = tomllib.loads(Path(__file__).with_name("chat.toml").read_text(encoding="utf-8"))
    draw = random.Random(SEED)
    rendered = []
    for _ in range(CONVERSATIONS):
        scenes = draw.sample(data["scene"], SCENES)
        messages = [message for scene in scenes for message in _messages(scene, data["slots"], draw)]
        rendered.append(
            template.render(messages, thinking=True, answered=True, tools=list(map(_tool, scenes)))
        )
    return rendered


def _tool(scene: dict[str, Any]) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": f"the {name}"} for name in scene["arguments"]}
    schema = {"type": "object", "properties": properties, "required": scene["arguments"]}
    about = {"name": scene["tool"], "description": scene["about"], "parameters": schema}
    return {"type": "function", "function": about}


def _messages(
    scene: dict[str, Any], slots: dict[str, list[str]], draw: random.Random
) -> list[dict[str, Any]]:
    values: dict[str, Any] = {name: draw.choice(choices) for name, choices in slots.items()}
    values |= {"number": draw.randint(10, 28), "count": draw.randint(2, 60)}

    def filled(part: str) -> str:
        return str(scene[part]).format(**values)

    json.loads(filled("result"))  # a result is JSON, whatever was drawn
    arguments = {name: values[name] for name in scene["arguments"]}
    call = {"type": "function", "function": {"name": scene["tool"], "arguments": arguments}}
    return [
        {"role": "user", "content": filled("user")},
        {"role": "assistant", "content": "", "reasoning_content": filled("thought"), "tool_calls": [call]},
        {"role": "tool", "content": filled("result")},
        {"role": "assistant", "content": filled("answer"), "reasoning_content": filled("thought")},
    ]
