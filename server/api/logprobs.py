"""Log-probabilities in the shapes that clients know: OpenAI's two, llama-server's and vLLM's."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any

from qwen_serve.server.api.sse import Lazily

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from qwen_serve.server.api.fields.generation import GenerationRequest
    from qwen_serve.server.api.formats.completions import CompletionRequest
    from qwen_serve.server.chat import TextGeneration
    from qwen_serve.server.engine import TokenLogprobs, Vocab

LOWEST = -9999.0
"""JSON has no infinity; vLLM's figure."""


class TokenNames:
    """What clients are shown of a token."""

    def __init__(self, vocab: Vocab, *, as_ids: bool = False) -> None:
        """With `as_ids` tokens are called "token_id:7", as vLLM does where it is asked for."""
        self._vocab, self._as_ids = vocab, as_ids

    def bytes(self, token: int) -> bytes:
        """What it adds to a text, a control token its own name."""
        return self._vocab.spelling(token)

    def name(self, token: int) -> str:
        """Its text, with U+FFFD for a part of a character."""
        return f"token_id:{token}" if self._as_ids else self.bytes(token).decode("utf-8", "replace")

    def entry(self, token: int, logprob: float, *, with_id: bool) -> dict[str, Any]:
        """OpenAI's object, with llama-server's `id` or without; `bytes` is null for a control token."""
        found = {
            "token": self.name(token),
            "logprob": max(logprob, LOWEST),
            "bytes": list(self._vocab.token_bytes(token)) or None,
        }
        return {"id": token, **found} if with_id else found

    def scored(self, told: TokenLogprobs, *, n_top: int, with_id: bool = False) -> dict[str, Any]:
        """The same, with the likeliest ones at its place."""
        top = [self.entry(*other, with_id=with_id) for other in told.top[:n_top]]
        return {**self.entry(told.token, told.logprob, with_id=with_id), "top_logprobs": top}


class ChatLogprobs:
    """Of one choice: `{"content": [...]}`, a token of the reply each, its reasoning and tags included.

    The token that ends the reply is not among them, so the `bytes` together are the text. llama-server's
    `n_probs` gives the same with the tokens' ids.
    """

    def __init__(self, request: GenerationRequest, vocab: Vocab, generation: TextGeneration) -> None:
        self._names = TokenNames(vocab, as_ids=bool(request.return_tokens_as_token_ids))
        self._n_top, self._with_id = request.answer_logprobs, request.by_n_probs
        self._generation = generation

    @property
    def asked(self) -> bool:
        """Whether they are wanted at all."""
        return self._n_top is not None

    def all(self) -> dict[str, Any] | None:
        """Of the whole choice, which is complete."""
        return self.new()

    def prompt(self) -> dict[str, Any] | None:
        """Those of an echoed prompt are not told in this shape."""
        return None

    def new(self, *, last: bool = False) -> dict[str, Any] | None:
        """Of the tokens since the last time; None where there are none, or none were asked for."""
        if self._n_top is None or not (found := self._generation.new_logprobs()):
            return None
        write = partial(self._names.scored, n_top=self._n_top, with_id=self._with_id)
        return {"content": Lazily(write, found), "refusal": None}


class ResponseLogprobs:
    """Of the texts of one response: what is its reasoning or in its calls is left out.

    The parts of the reply must be shown to it in order. A token counts for the first text that it has a part
    in.
    """

    def __init__(self, n_top: int | None, vocab: Vocab, generation: TextGeneration) -> None:
        """`n_top` alternatives to each token; None where nothing was asked for."""
        self._n_top, self._vocab, self._generation = n_top, vocab, generation
        self._names = TokenNames(vocab)
        self._tokens: list[TokenLogprobs] = []
        self._ends: list[int] = []
        """Bytes up to the end of each token."""
        self._written = bytearray()
        self._place = self._told = 0
        """Bytes and tokens that were shown, or told."""

    def written(self, found: list[TokenLogprobs]) -> Lazily[TokenLogprobs]:
        """Tokens as clients are told of them."""
        return Lazily(partial(self._names.scored, n_top=self._n_top or 0), found)

    def of(self, text: str) -> list[TokenLogprobs]:
        """The tokens of a text, which comes next."""
        if self._n_top is None:
            return []
        start = self.skip(text)
        first = max(self._told, bisect_right(self._ends, start))
        self._told = max(first, bisect_left(self._ends, self._place) + 1)
        return self._tokens[first : self._told]

    def skip(self, text: str) -> int:
        """Something else comes next: where it begins."""
        for told in self._generation.new_logprobs():
            self._written += self._vocab.token_bytes(told.token)
            self._tokens.append(told)
            self._ends.append(len(self._written))
        part = text.encode("utf-8", "surrogatepass")
        start = self._written.find(part, self._place)
        if start < 0:  # U+FFFD stands for something in it
            start, part = self._place, bytes(self._written[self._place :])
        self._place = start + len(part)
        return start


class CompletionLogprobs:
    """Of one choice of a text completion: parallel lists, an entry a token.

    Where the text is echoed, those of the prompt come first, the first of them null. The token that ended the
    text, if one did, is the last: a client that asks for one token finds one (lm-eval drops it again).
    """

    def __init__(
        self, request: CompletionRequest, vocab: Vocab, generation: TextGeneration, prompt: Sequence[int]
    ) -> None:
        self._names = TokenNames(vocab, as_ids=bool(request.return_tokens_as_token_ids))
        self._n_top = request.logprobs
        self._generation = generation
        self._prompt = prompt if request.echo else ()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0
        """Characters before the next token."""

    @property
    def asked(self) -> bool:
        """Whether they are wanted at all."""
        return self._n_top is not None

    def all(self) -> dict[str, Any] | None:
        """Of the whole choice, which is complete."""
        return self._written([*self._of_prompt(), *self._of_answer(last=True)]) if self.asked else None

    def prompt(self) -> dict[str, Any] | None:
        """Of the echoed prompt, which has been read."""
        return self._written(self._of_prompt())

    def new(self, *, last: bool) -> dict[str, Any] | None:
        """Of the tokens since the last time; None where there are none. `last`: there will be no more."""
        return self._written(self._of_answer(last=last)) if self.asked else None

    def _of_prompt(self) -> list[tuple[int, TokenLogprobs | None]]:
        told = self._generation.generation.logprobs
        scores = told.prompt if told is not None else []
        return list(zip(self._prompt, [None, *scores], strict=False))

    def _of_answer(self, *, last: bool) -> list[tuple[int, TokenLogprobs | None]]:
        found = self._generation.new_logprobs()
        if last and (ending := self._generation.ending):
            found.append(ending)
        return [(told.token, told) for told in found]

    def _written(self, found: Iterable[tuple[int, TokenLogprobs | None]]) -> dict[str, Any] | None:
        names: list[str] = []
        logprobs: list[float | None] = []
        tops: list[TokenLogprobs | None] = []
        offsets: list[int] = []
        for token, told in found:
            names.append(self._names.name(token))
            logprobs.append(None if told is None else max(told.logprob, LOWEST))
            tops.append(told)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._names.bytes(token)))
        if not names:
            return None
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": Lazily(self._top, tops),
            "text_offset": offsets,
        }

    def _top(self, told: TokenLogprobs | None) -> dict[str, float] | None:
        """The likeliest, and the token itself; of several that are called the same, the likeliest."""
        if told is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in [*told.top[: self._n_top], (told.token, told.logprob)]:
            top.setdefault(self._names.name(token), max(logprob, LOWEST))
        return top


def prompt_logprobs(request: GenerationRequest, vocab: Vocab, generation: TextGeneration) -> dict[str, Any]:
    """vLLM's field of that name: null for the first token, then an object by token id. Empty if not asked."""
    told = generation.generation.logprobs
    if request.prompt_logprobs is None or told is None:
        return {}
    names, n_top = TokenNames(vocab), request.prompt_logprobs

    def write(at: TokenLogprobs | None) -> dict[str, Any] | None:
        if at is None:
            return None
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(at.top[:n_top], 1)}
        ranked = {at.token: (at.logprob, at.rank), **ranked}
        return {
            str(token): {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": names.name(token)}
            for token, (logprob, rank) in ranked.items()
        }

    return {"prompt_logprobs": Lazily(write, [None, *told.prompt])}
