"""A generation as text."""

from collections.abc import AsyncIterator, Callable, Mapping

from qwen_serve.server.engine import FinishReason, Generation, TokenLogprobs, Vocab

from .detokenizer import Detokenizer, StopStrings


class TextGeneration(Detokenizer):
    """A running generation as text: `async for delta in generation`, once.

    Deltas never contain part of a stop string. They are non-empty, except to report the prompt's progress.
    The sequence is freed when a stop string is complete, when the loop is left early or its task is
    cancelled, and on `cancel`. Raises what the engine's iterator raises.
    """

    def __init__(
        self,
        generation: Generation,
        vocab: Vocab,
        stops: StopStrings | None = None,
        *,
        spell_control: bool = False,
        tags: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(vocab, stops, spell_control=spell_control, tags=tags)
        self.generation, self.request = generation, generation.request
        self._scored = 0
        """Tokens whose log-probabilities were returned."""

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

    async def text(self, arrived: Callable[[], None] = lambda: None) -> str:
        """All of it. `arrived` is called after each part."""
        parts = []
        async for part in self:
            parts.append(part)
            arrived()
        return "".join(parts)

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; later tokens are not part of the text."""
        return self.stop_string is not None

    def cancel(self) -> None:
        """Frees the sequence. May be called at any time, and again."""
        self.generation.cancel()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended; None until all text has been read. `cancelled` if the rest will not be read."""
        if self.stopped:
            return "stop"
        if self.ended or self.generation.finish_reason == "cancelled":
            return self.generation.finish_reason
        return None

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens inside a think block, without its closing tag; None if there is no block."""
        watch = self.request.thinking  # it may have counted tokens that are not part of the text
        return None if watch is None else min(watch.tokens, self.completion_tokens)

    @property
    def unscored(self) -> int:
        """How many of the text's tokens have log-probabilities that were not returned before."""
        return 0 if self.request.logprobs is None else self.certain_tokens - self._scored

    def new_logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the text's tokens that were not returned before; empty if not requested."""
        if self.request.logprobs is None:
            return []
        start, self._scored = self._scored, self.certain_tokens
        return self.request.logprobs.tokens[start : self._scored]

    @property
    def ending(self) -> TokenLogprobs | None:
        """Log-probabilities of the token that ended the text, if they were requested and the token is not
        part of the text."""
        logprobs = self.request.logprobs
        if logprobs is None or self.stopped or self.finish_reason != "stop":
            return None
        return next(iter(logprobs.tokens[self.completion_tokens :]), None)
