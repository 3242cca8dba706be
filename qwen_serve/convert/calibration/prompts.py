"""The authored prompts of `prompts.toml`, rendered with the model's own chat template."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qwen_serve.convert.errors import ConvertError

Purpose = Literal["calibration", "search", "evaluation"]

PROMPTS = Path(__file__).with_name("prompts.toml")
SEARCH_STEP = 4


@dataclass(frozen=True)
class Prompt:
    """An opening user message, to be answered with or without thinking."""

    subject: str
    thinking: bool
    text: str


def load_prompts(purpose: Purpose) -> list[Prompt]:
    """The prompts for one purpose, in the file's order; evaluation shares none with the others.

    A search uses every fourth calibration prompt, with different answers.
    """
    if purpose == "search":
        return load_prompts("calibration")[::SEARCH_STEP]
    tables = tomllib.loads(PROMPTS.read_text(encoding="utf-8"))[purpose]
    return [Prompt(t["subject"], t["thinking"], text) for t in tables for text in t["prompts"]]


class ChatTemplate:
    """A GGUF's `tokenizer.chat_template`, with the functions that Hugging Face templates expect."""

    def __init__(self, source: str) -> None:
        """Raises `ConvertError` if the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConvertError(f"the model's chat template does not compile: {error}") from None

    def render(self, prompt: Prompt) -> str:
        """The text up to the beginning of the assistant's answer.

        Raises:
            ConvertError: the template rejects a plain user message.
        """
        try:
            return self._template.render(
                messages=[{"role": "user", "content": prompt.text}],
                add_generation_prompt=True,
                enable_thinking=prompt.thinking,
            )
        except TemplateError as error:
            raise ConvertError(f"the model's chat template rejects a user message: {error}") from None


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
