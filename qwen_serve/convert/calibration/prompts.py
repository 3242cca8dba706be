"""The authored prompts of `prompts.toml`, rendered with the model's own chat template."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qwen_serve.convert.errors import ConvertError
from qwen_serve.llamacpp.model import Model

Purpose = Literal["calibration", "search", "evaluation"]

PROMPTS = Path(__file__).with_name("prompts.toml")
SEARCH_STEP = 4


@dataclass(frozen=True)
class Prompt:
    """An opening user message, to be answered with or without thinking."""

    subject: str
    thinking: bool
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation that it opens."""
        return [{"role": "user", "content": self.text}]


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

    @classmethod
    def of(cls, model: Model) -> ChatTemplate:
        """The template of a model. Raises `ConvertError` if it has none."""
        if source := model.metadata().get("tokenizer.chat_template"):
            return cls(source)
        raise ConvertError(
            f"{model.path}: no tokenizer.chat_template, so the model cannot be prompted to write its own "
            "text; add chat_template.jinja to the checkpoint, or use --calibration FILE and --no-kld"
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool,
        answered: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation's text, unless it is `answered` up to the beginning of the assistant's answer.

        Raises:
            ConvertError: the template rejects the messages.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=not answered,
                enable_thinking=thinking,
            )
        except TemplateError as error:
            raise ConvertError(f"the model's chat template rejects a user message: {error}") from None


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
