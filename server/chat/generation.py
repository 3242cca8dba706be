"""The one way from a prompt to text, which every endpoint takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .detokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from qwen_serve.server.engine import (
        Constraint,
        Engine,
        FinishReason,
        Generation,
        Prompt,
        SamplingParams,
        ThinkingLimits,
        TokenLogprobs,
    )

    from .detokenizer import StopStrings


class TextGeneration:
    """A running generation as text: `async for delta in generation`, once.

    Deltas are non-empty and never hold a part of a stop string. The sequence is freed when a stop string is
    completed, when the loop is left early or its task is cancelled, and on `cancel`. Raises what the engine's
    iterator raises.
    """

    def __init__(self, generation: Generation, detokenizer: Detokenizer) -> None:
        self.generation = generation
        self._detokenizer = detokenizer
        self._exhausted = False
        self._told = 0
        """Tokens whose log-probabilities were given out."""

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for tokens in self.generation:
                if delta := self._detokenizer.feed(tokens):
                    yield delta
                if self._detokenizer.stopped:
                    break
            self._exhausted = True
            if delta := self._detokenizer.flush():
                yield delta
        finally:
            self.generation.cancel()

    def cancel(self) -> None:
        """Free the sequence. May be called at any time, and again."""
        self.generation.cancel()

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until all text was read; `cancelled` also when it never will be."""
        if self._detokenizer.stopped:
            return "stop"
        if self._exhausted or self.generation.finish_reason == "cancelled":
            return self.generation.finish_reason
        return None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._detokenizer.stop_string

    @property
    def prompt_tokens(self) -> int:
        return self.generation.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self.generation.cached_tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens of the text so far; neither the end-of-generation token nor those of a stop string."""
        return self._detokenizer.completion_tokens

    @property
    def reasoning_tokens(self) -> int | None:
        """How many of them stand in a think block, its closing tag not counted; None where there is none."""
        watch = self.generation.thinking  # which may know of tokens that are not a part of the text
        return None if watch is None else min(watch.tokens, self.completion_tokens)

    def new_logprobs(self) -> list[TokenLogprobs]:
        """Of the tokens of the text so far those that were not given out before; none if not asked for."""
        if self.generation.logprobs is None:
            return []
        start, self._told = self._told, self._detokenizer.certain_tokens
        return self.generation.logprobs.tokens[start : self._told]

    @property
    def ending(self) -> TokenLogprobs | None:
        """Of the token that ended the text without being a part of it, if one did and it was asked for."""
        told = self.generation.logprobs
        if told is None or self._detokenizer.stopped or self.finish_reason != "stop":
            return None
        return next(iter(told.tokens[self.completion_tokens :]), None)


def generate(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    max_tokens: int | None = None,
    *,
    stops: StopStrings | None = None,
    stream: bool = True,
    salt: str = "",
    constraint: Constraint | None = None,
    thinking: ThinkingLimits | None = None,
    spell_control: bool = False,
) -> TextGeneration:
    """Submit a prompt at once and return its text to be. Must be called on the event loop.

    `max_tokens` None means as many as the context has room for. Without `stream` the text comes in one piece,
    at the end: a stop string cuts it then, but does not end it early. Only requests with the same `salt`
    share prefixes. With `spell_control` control tokens are a part of the text, by their names. Raises what
    `Engine.submit` raises (QueueFull, EngineDead).
    """
    generation = engine.submit(
        prompt, params, max_tokens, stream=stream, salt=salt, constraint=constraint, thinking=thinking
    )
    return TextGeneration(generation, Detokenizer(engine.vocab, stops, spell_control=spell_control))
