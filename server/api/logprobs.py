"""Log-probabilities in the shapes that clients know: OpenAI's two, llama-server's and vLLM's."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any

from qwen_serve.server.api.sse import Lazily

if TYPE_CHECKING:
    from qwen_serve.server.api.fields.generation import GenerationRequest
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

    def scored(self, at: TokenLogprobs, *, n_top: int, with_id: bool = False) -> dict[str, Any]:
        """The same, with the likeliest ones at its place."""
        top = [self.entry(*other, with_id=with_id) for other in at.top[:n_top]]
        return {**self.entry(at.token, at.logprob, with_id=with_id), "top_logprobs": top}


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
        """This shape has none of an echoed prompt."""
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
        self._place = self._given = 0
        """Bytes that were shown, and tokens whose log-probabilities were given out."""

    def written(self, found: list[TokenLogprobs]) -> Lazily[TokenLogprobs]:
        """Tokens as clients get them."""
        return Lazily(partial(self._names.scored, n_top=self._n_top or 0), found)

    def of(self, text: str) -> list[TokenLogprobs]:
        """The tokens of a text, which comes next."""
        if self._n_top is None:
            return []
        start = self.skip(text)
        first = max(self._given, bisect_right(self._ends, start))
        self._given = max(first, bisect_left(self._ends, self._place) + 1)
        return self._tokens[first : self._given]

    def skip(self, text: str) -> int:
        """Something else comes next: where it begins."""
        for at in self._generation.new_logprobs():
            self._written += self._vocab.token_bytes(at.token)
            self._tokens.append(at)
            self._ends.append(len(self._written))
        part = text.encode("utf-8", "surrogatepass")
        start = self._written.find(part, self._place)
        if start < 0:  # U+FFFD stands for something in it
            start, part = self._place, bytes(self._written[self._place :])
        self._place = start + len(part)
        return start


def prompt_logprobs(request: GenerationRequest, vocab: Vocab, generation: TextGeneration) -> dict[str, Any]:
    """vLLM's field of that name: null for the first token, then an object by token id. Empty if not asked."""
    logprobs = generation.generation.logprobs
    if request.prompt_logprobs is None or logprobs is None:
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

    return {"prompt_logprobs": Lazily(write, [None, *logprobs.prompt])}
