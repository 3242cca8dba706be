"""Log-probabilities in the shapes that clients know: OpenAI's two, llama-server's and vLLM's."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from qwen_serve.server.api.sse import Lazily, Written, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from qwen_serve.server.api.fields.generation import GenerationRequest
    from qwen_serve.server.chat import TextGeneration
    from qwen_serve.server.engine import TokenLogprobs, Vocab

KEPT = 50_000
"""Maximum tokens whose JSON is kept, in each shape."""

LOWEST = -9999.0
"""vLLM's number for minus infinity, which JSON does not have."""


Json = bytes


class TokenNames:
    """Names and bytes of tokens, as clients see them."""

    def __init__(self, vocab: Vocab, *, as_ids: bool = False) -> None:
        """With `as_ids`, vLLM's option, a token's name is "token_id:7"."""
        self._vocab, self._as_ids = vocab, as_ids
        self._names = vocab.names

    def bytes(self, token: int) -> bytes:
        """The bytes that the token adds to a text; for a control token, its name."""
        return self._vocab.spelling(token)

    def name(self, token: int) -> str:
        """The token's text, with U+FFFD for a part of a character."""
        return f"token_id:{token}" if self._as_ids else self._names[token]

    def top(self, at: TokenLogprobs, n: int) -> dict[str, float]:
        """The `n` likeliest tokens and the token itself, by name. If several have the same name, the
        likeliest."""
        names = self._names
        top: dict[str, float] = {}
        for token, logprob in zip(at.best.tolist()[:n], at.best_logprobs.tolist(), strict=False):
            name = f"token_id:{token}" if self._as_ids else names[token]
            if name not in top:
                top[name] = max(LOWEST, logprob)
        top.setdefault(self.name(at.token), max(at.logprob, LOWEST))
        return top

    def scored(self, found: list[TokenLogprobs], *, n_top: int, with_id: bool = False) -> Json:
        """A list of OpenAI's objects as JSON, with llama-server's `id` or without, and in each the `n_top`
        likeliest tokens at its place. `bytes` is null for a control token."""
        kept = Kept(partial(self._around, with_id=with_id))
        around = self._vocab.kept.setdefault((self._as_ids, with_id), kept).__getitem__
        written = []
        for at, (own, *others) in zip(found, _numbers(found, n_top), strict=True):
            before, behind = around(at.token)
            pairs = zip(map(around, at.best[:n_top].tolist()), others, strict=True)
            tops = b"},".join([before + other + behind for (before, behind), other in pairs])
            close = b"}]}" if tops else b"]}"
            written.append(b'%b%b%b,"top_logprobs":[%b%b' % (before, own, behind, tops, close))
        return b"[%b]" % b",".join(written)

    def _around(self, token: int, *, with_id: bool) -> tuple[Json, Json]:
        """What comes before and behind a token's log-probability in its object, which is not closed."""
        named = {"id": token, "token": self.name(token)} if with_id else {"token": self.name(token)}
        bytes_of = encode(list(self._vocab.token_bytes(token)) or None)
        return encode(named)[:-1] + b',"logprob":', b',"bytes":' + bytes_of


class Kept(dict[int, tuple[Json, Json]]):
    """What is made of tokens, each once as long as there are not many."""

    def __init__(self, make: Callable[[int], tuple[Json, Json]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> tuple[Json, Json]:
        if len(self) >= KEPT:
            self.clear()
        made = self[token] = self._make(token)
        return made


def _numbers(found: Sequence[TokenLogprobs], n: int) -> Iterator[list[bytes]]:
    """At each place the log-probabilities of the token itself and of the `n` likeliest, as JSON."""
    each = [[at.logprob, *at.best_logprobs[:n].tolist()] for at in found]
    flat = [max(number, LOWEST) for numbers in each for number in numbers]
    written = iter(to_json(flat)[1:-1].split(b","))
    return (list(islice(written, len(numbers))) for numbers in each)


class ChatLogprobs:
    """Log-probabilities of one choice: `{"content": [...]}`, with an entry for each token of the reply, its
    reasoning and tags included.

    The token that ends the reply is left out, so the joined `bytes` are the text. With llama-server's
    `n_probs` the entries also have the tokens' ids.
    """

    def __init__(self, request: GenerationRequest, vocab: Vocab, generation: TextGeneration) -> None:
        self._names = TokenNames(vocab, as_ids=bool(request.return_tokens_as_token_ids))
        self._n_top, self._with_id = request.answer_logprobs, request.by_n_probs
        self._generation = generation

    @property
    def asked(self) -> bool:
        """Whether the request asks for log-probabilities."""
        return self._n_top is not None

    def all(self) -> dict[str, Any] | None:
        """The log-probabilities of the whole choice, which is complete; an empty list if it has no token."""
        return self.new() or ({"content": [], "refusal": None} if self.asked else None)

    def prompt(self) -> dict[str, Any] | None:
        """None, since this format has no field for those of an echoed prompt."""
        return None

    def new(self, *, last: bool = False) -> dict[str, Any] | None:
        """Log-probabilities of the tokens since the last call; None if there are none or none were
        requested."""
        if self._n_top is None or not (found := self._generation.new_logprobs()):
            return None
        write = partial(self._names.scored, n_top=self._n_top, with_id=self._with_id)
        return {"content": Written(write, found), "refusal": None}


class ResponseLogprobs:
    """Log-probabilities of one response's texts, without the tokens of its reasoning and its calls.

    The caller passes all parts of the reply in order. A token that spans two texts belongs to the first.
    """

    def __init__(self, n_top: int | None, vocab: Vocab, generation: TextGeneration) -> None:
        """`n_top`: number of alternatives to each token; None if the request wants no log-probabilities."""
        self._n_top, self._vocab, self._generation = n_top, vocab, generation
        self._names = TokenNames(vocab)
        self._tokens: list[TokenLogprobs] = []
        self._ends: list[int] = []
        """For each token, the byte offset of its end."""
        self._written = bytearray()
        self._place = self._given = 0
        """Bytes passed so far, and tokens whose log-probabilities were returned."""

    def written(self, found: list[TokenLogprobs]) -> Written[TokenLogprobs]:
        """The tokens in the clients' format."""
        return Written(partial(self._names.scored, n_top=self._n_top or 0), found)

    def of(self, text: str) -> list[TokenLogprobs]:
        """The tokens of `text`, the next part of the reply."""
        if self._n_top is None:
            return []
        start = self.skip(text)
        first = max(self._given, bisect_right(self._ends, start))
        self._given = max(first, bisect_left(self._ends, self._place) + 1)
        return self._tokens[first : self._given]

    def skip(self, text: str) -> int:
        """Skips a part that is not text; returns where it begins."""
        for at in self._generation.new_logprobs():
            self._written += self._vocab.token_bytes(at.token)
            self._tokens.append(at)
            self._ends.append(len(self._written))
        part = text.encode("utf-8", "surrogatepass")
        start = self._written.find(part, self._place)
        if start < 0:  # the text contains U+FFFD in place of some bytes
            start, part = self._place, bytes(self._written[self._place :])
        self._place = start + len(part)
        return start


def prompt_logprobs(request: GenerationRequest, vocab: Vocab, generation: TextGeneration) -> dict[str, Any]:
    """vLLM's field of that name: null for the first token, then an object by token id. Empty if the request
    does not ask for it."""
    logprobs = generation.request.logprobs
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
