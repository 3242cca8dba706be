"""Log-probabilities in the shapes that clients know: OpenAI's two, llama-server's and vLLM's."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from pydantic_core import to_json

from qwen_serve.server.api.fields.generation import GenerationRequest
from qwen_serve.server.api.sse import Lazily, Written, encode
from qwen_serve.server.chat import TextGeneration
from qwen_serve.server.engine import TokenLogprobs, Vocab

LOWEST = -9999.0
"""vLLM's number for minus infinity, which JSON does not have."""

TOGETHER = 256
"""Most places that are written at once."""

SOON = 32
"""Most tokens whose log-probabilities are written on the event loop, in up to a millisecond."""

Json = bytes


def in_list(items: list[Json]) -> Json:
    """A list of values that are JSON already."""
    return b"[%b]" % b",".join(items)


class TokenNames:
    """Names and bytes of tokens, as clients see them."""

    def __init__(self, vocab: Vocab, *, as_ids: bool = False) -> None:
        """With `as_ids`, vLLM's option, a token's name is "token_id:7"."""
        self._vocab, self._as_ids = vocab, as_ids
        self._named = vocab.kept.setdefault("name", Kept(lambda token: encode(_name(vocab, token))))
        self._spelt = vocab.kept.setdefault("bytes", Kept(lambda token: encode(_bytes(vocab, token))))

    def bytes(self, token: int) -> bytes:
        """The bytes that the token adds to a text; for a control token, its name."""
        return self._vocab.spelling(token)

    def name(self, token: int) -> str:
        """The token's text, with U+FFFD for a part of a character."""
        return f"token_id:{token}" if self._as_ids else _name(self._vocab, token)

    def _names(self, tokens: list[int]) -> list[Json]:
        if self._as_ids:
            return [b'"token_id:%d"' % token for token in tokens]
        return list(map(self._named.__getitem__, tokens))

    def tops(self, found: list[TokenLogprobs | None], n_top: int) -> Json:
        """A list as JSON, with an object at each place: log-probabilities of the `n_top` likeliest tokens and
        of the token itself, by name. If several have the same name, the likeliest. null for None."""
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
            names, numbers = self._names(ids), _numbers(logprobs)
            between, colons = [b","] * len(ids), [b":"] * len(ids)
            for start, end in pairwise([0, *ends]):
                if len(set(names[start:end])) < end - start:
                    for place, name in enumerate(names[start:end], start):
                        if name in names[start:place]:
                            between[place] = names[place] = colons[place] = numbers[place] = b""
                between[start] = b"},{"
            written.append(_joined(between, names, colons, numbers)[2:] + b"}")
        return in_list(written)

    def scored(self, found: list[TokenLogprobs], *, n_top: int, with_id: bool = False) -> Json:
        """A list of OpenAI's objects as JSON, with llama-server's `id` or without, and in each the `n_top`
        likeliest tokens at its place. `bytes` is null for a control token."""
        written = []
        for some in _pieces(found):
            ids: list[int] = []
            logprobs: list[float] = []
            starts = []
            for at in some:
                starts.append(len(ids))
                ids += (at.token, *at.best[:n_top].tolist())
                logprobs += (at.logprob, *at.best_logprobs[:n_top].tolist())
            n = len(ids)
            before = [b'},{"id":%d,"token":' % token for token in ids] if with_id else [b'},{"token":'] * n
            behind = [b""] * n
            for start, end in pairwise([*starts, n]):
                before[start] = b"," + before[start][2:]
                behind[start] = b',"top_logprobs":['
                if end > start + 1:
                    before[start + 1] = before[start + 1][2:]
                    behind[end - 1] = b"}"
                behind[end - 1] += b"]}"
            bytes_of = list(map(self._spelt.__getitem__, ids))
            columns = self._names(ids), [b',"logprob":'] * n, _numbers(logprobs), [b',"bytes":'] * n, bytes_of
            written.append(_joined(before, *columns, behind)[1:])
        return in_list(written)


class Kept(dict[int, Json]):
    """What is written of each token that was asked for, once for all answers."""

    def __init__(self, write: Callable[[int], Json]) -> None:
        super().__init__()
        self._write = write

    def __missing__(self, token: int) -> Json:
        made = self[token] = self._write(token)
        return made


def _name(vocab: Vocab, token: int) -> str:
    return vocab.spelling(token).decode("utf-8", "replace")


def _bytes(vocab: Vocab, token: int) -> list[int] | None:
    return list(vocab.token_bytes(token)) or None


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
