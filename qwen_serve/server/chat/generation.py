"""A generation as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from qwen_serve.server.engine import FinishReason, Generation, TokenLogprobs

    from .detokenizer import Detokenizer, StopFilter


class TextGeneration:
    """A running generation as text: `async for delta in generation`, once.

    Deltas never contain part of a stop string. They are non-empty, except to report the prompt's progress.
    The sequence is freed when a stop string is complete, when the loop is left early or its task is
    cancelled, and on `cancel`. Raises what the engine's iterator raises.
    """

    def __init__(self, generation: Generation, detokenizer: Detokenizer) -> None:
        self.generation, self.request = generation, generation.request
        self._detokenizer = detokenizer
        self._scored = 0
        """Tokens whose log-probabilities were returned."""
        self.tokens: list[int] | None = None
        """All tokens received, if a caller puts a list here to collect them."""

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for tokens in self.generation:
                if (delta := self.feed(tokens)) or not tokens:
                    yield delta
                if self.stopped:
                    break
            if delta := self.flush():
                yield delta
        finally:
            self.cancel()

    def feed(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is now final, which may be empty."""
        if self.tokens is not None:
            self.tokens += tokens
        return self._detokenizer.feed(tokens)

    def flush(self) -> str:
        """Ends the tokens; returns the text held back."""
        self.end()
        return self._detokenizer.flush()

    def decode(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens; returns their text, with marked tags (`markup`). The caller applies
        `stops`."""
        if self.tokens is not None:
            self.tokens += tokens
        return self._detokenizer.decode(tokens)

    def end(self) -> None:
        """Ends the tokens."""
        self._detokenizer.ended = True

    @property
    def stops(self) -> StopFilter | None:
        """What cuts the text, if anything does."""
        return self._detokenizer.stops

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; later tokens are not part of the text."""
        return self._detokenizer.stop_string is not None

    def cancel(self) -> None:
        """Frees the sequence. May be called at any time, and again."""
        self.generation.cancel()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended; None until all text has been read. `cancelled` if the rest will not be read."""
        if self.stopped:
            return "stop"
        if self._detokenizer.ended or self.generation.finish_reason == "cancelled":
            return self.generation.finish_reason
        return None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._detokenizer.stop_string

    @property
    def completion_tokens(self) -> int:
        """Number of tokens in the text so far, without the end-of-generation token and those of a stop
        string."""
        return self._detokenizer.completion_tokens

    @property
    def certain_tokens(self) -> int:
        """Number of tokens that cannot become part of a stop string any more."""
        return self._detokenizer.certain_tokens

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens inside a think block, without its closing tag; None if there is no block."""
        watch = self.request.thinking  # it may have counted tokens that are not part of the text
        return None if watch is None else min(watch.tokens, self.completion_tokens)

    def new_logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the text's tokens that were not returned before; empty if not requested."""
        if self.request.logprobs is None:
            return []
        start, self._scored = self._scored, self._detokenizer.certain_tokens
        return self.request.logprobs.tokens[start : self._scored]

    @property
    def ending(self) -> TokenLogprobs | None:
        """Log-probabilities of the token that ended the text, if they were requested and the token is not
        part of the text."""
        logprobs = self.request.logprobs
        if logprobs is None or self.stopped or self.finish_reason != "stop":
            return None
        return next(iter(logprobs.tokens[self.completion_tokens :]), None)
