"""Log-probabilities in the shapes that clients know: OpenAI's two, llama-server's and vLLM's."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from pydantic_core import to_json

from qwen_serve.server.api.fields.generation import GenerationRequest
from qwen_serve.server.api.sse import Lazily, Written, encode
from qwen_serve.server.chat import TextGeneration
from qwen_serve.server.engine import TokenLogprobs, Vocab

KEPT = 50_000
"""Maximum tokens whose JSON is kept, in each shape."""

LOWEST = -9999.0
"""vLLM's number for minus infinity, which JSON does not have."""

TOGETHER = 256
"""Most places that are written at once."""

SOON = 32
"""Most tokens whose log-probabilities are written on the event loop, in up to a millisecond."""

Json = bytes
Made = TypeVar("Made")


def in_list(items: list[Json]) -> Json:
    """A list of values that are JSON already."""
    return b"[%b]" % b",".join(items)


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

    def tops(self, found: list[TokenLogprobs | None], n_top: int) -> Json:
        """A list as JSON, with an object at each place: log-probabilities of the `n_top` likeliest tokens and
        of the token itself, by name. If several have the same name, the likeliest. null for None."""
        named = self._kept("name", lambda token: b"," + encode(self.name(token)) + b":")
        known = [at for at in found if at is not None]
        written = [b"null"] * (len(found) - len(known))  # at the beginning of a prompt
        for some in _pieces(known):
            ids: list[int] = []
            logprobs: list[float] = []
            ends = []
            for at in some:
                ids += at.best[:n_top].tolist()
                logprobs += at.best_logprobs[:n_top].tolist()
                if at.rank > n_top:
                    ids.append(at.token)
                    logprobs.append(at.logprob)
                ends.append(len(ids))
            names, numbers = list(map(named, ids)), _numbers(logprobs)
            for start, end in pairwise([0, *ends]):
                if len(set(names[start:end])) < end - start:
                    for place, name in enumerate(names[start:end], start):
                        if name in names[start:place]:
                            names[place] = numbers[place] = b""
                names[start] = b"},{" + names[start][1:]
            written.append(_joined(names, numbers)[2:] + b"}")
        return in_list(written)

    def scored(self, found: list[TokenLogprobs], *, n_top: int, with_id: bool = False) -> Json:
        """A list of OpenAI's objects as JSON, with llama-server's `id` or without, and in each the `n_top`
        likeliest tokens at its place. `bytes` is null for a control token."""
        around = self._kept(with_id, partial(self._around, with_id=with_id))
        written = []
        for some in _pieces(found):
            ids: list[int] = []
            logprobs: list[float] = []
            starts = []
            for at in some:
                starts.append(len(ids))
                ids += (at.token, *at.best[:n_top].tolist())
                logprobs += (at.logprob, *at.best_logprobs[:n_top].tolist())
            before, behind = map(list, zip(*map(around, ids), strict=True))
            for start, end in pairwise([*starts, len(ids)]):
                before[start] = b"," + before[start][2:]
                behind[start] += b',"top_logprobs":['
                if end > start + 1:
                    before[start + 1] = before[start + 1][2:]
                    behind[end - 1] += b"}"
                behind[end - 1] += b"]}"
            written.append(_joined(before, _numbers(logprobs), behind)[1:])
        return in_list(written)

    def _kept(self, kind: object, make: Callable[[int], Made]) -> Callable[[int], Made]:
        """`make`, called once for each token, for all answers."""
        made: Kept[Made] = self._vocab.kept.setdefault((self._as_ids, kind), Kept(make))
        return made.__getitem__

    def _around(self, token: int, *, with_id: bool) -> tuple[Json, Json]:
        """What comes before and behind a token's log-probability in its object, which is not closed; before,
        the object before it is."""
        named = {"id": token, "token": self.name(token)} if with_id else {"token": self.name(token)}
        bytes_of = encode(list(self._vocab.token_bytes(token)) or None)
        return b"}," + encode(named)[:-1] + b',"logprob":', b',"bytes":' + bytes_of


class Kept(dict[int, Made]):
    """What is made of tokens, each once as long as there are not many."""

    def __init__(self, make: Callable[[int], Made]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> Made:
        if len(self) >= KEPT:
            self.clear()
        made = self[token] = self._make(token)
        return made


def _pieces(found: list[TokenLogprobs]) -> Iterator[list[TokenLogprobs]]:
    """Places that are written together. Other threads may run between them."""
    return (found[start : start + TOGETHER] for start in range(0, len(found), TOGETHER))


def _numbers(logprobs: list[float]) -> list[Json]:
    if min(logprobs) < LOWEST:
        logprobs = [max(logprob, LOWEST) for logprob in logprobs]
    return to_json(logprobs)[1:-1].split(b",")


def _joined(*columns: list[Json]) -> Json:
    """The items of equally long lists: the first of each, then the second of each, and so on."""
    parts = [b""] * (len(columns) * len(columns[0]))
    for place, column in enumerate(columns):
        parts[place :: len(columns)] = column
    return b"".join(parts)


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
        self._written: list[Json] = []

    @property
    def asked(self) -> bool:
        """Whether the request asks for log-probabilities."""
        return self._n_top is not None

    def advance(self) -> None:
        """Write those of the tokens so far, for `all`, if that is done soon."""
        if self._generation.unscored <= SOON:
            self._write()

    def _write(self) -> None:
        if self._n_top is not None and (found := self._generation.new_logprobs()):
            written = self._names.scored(found, n_top=self._n_top, with_id=self._with_id)
            self._written.append(written[1:-1])

    def all(self) -> dict[str, Any] | None:
        """The log-probabilities of the whole choice, which is complete; an empty list if it has no token."""
        self._write()
        return {"content": Written(in_list, self._written), "refusal": None} if self.asked else None

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
