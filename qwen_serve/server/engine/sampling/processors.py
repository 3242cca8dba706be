"""Logits processors: a request's rules about single tokens, and its penalties."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.server.engine.errors import NoTokenLeft

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from .parameters import SamplingParams
    from .thinking import ThinkingWatch

NONE_LEFT = (
    "allowed_token_ids, bad_words, logit_bias, min_tokens and ignore_eos leave no token to choose; allow more"
)


class LogitRules:
    """A request's rules about single tokens, in vLLM's order: bias, then bans; penalties come next.

    It follows one answer: `accept` takes its tokens in order.
    """

    def __init__(self, params: SamplingParams, ends: Sequence[int], n_real: int) -> None:
        """`ends`: the tokens that end the generation, banned before there are `min_tokens`."""
        inside = [(token, bias) for token, bias in params.logit_bias if token < n_real]
        self._biased = np.array([token for token, _ in inside], np.intp)
        self._bias = np.array([bias for _, bias in inside], np.float32)
        self._banned: npt.NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            self._banned = np.ones(n_real, bool)
            self._banned[[token for token in params.allowed_token_ids if token < n_real]] = False
        words = [word for word in params.bad_words if max(word) < n_real]
        self._never = np.array([word[0] for word in words if len(word) == 1], np.intp)
        """Bad words of one token."""
        self._after: dict[int, list[tuple[list[int], int]]] = {}
        """Last token but one of a longer bad word -> (all tokens but the last, the last token)."""
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self._longest = max((len(word) - 1 for word in words), default=0)
        self._ends = np.array([token for token in ends if token < n_real], np.intp)
        self._until_end = params.min_tokens
        self._last: list[int] = []
        """The answer's last tokens, one fewer than the longest bad word has."""

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Whether a request has any such rule."""
        some = params.logit_bias or params.bad_words or params.min_tokens
        return bool(some) or params.allowed_token_ids is not None

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Change a row [n_real] in place. Raises NoTokenLeft."""
        if self._biased.size:
            logits[self._biased] += self._bias
        if self._banned is not None:
            logits[self._banned] = -np.inf
        if self._never.size:
            logits[self._never] = -np.inf
        for start, token in self._after.get(self._last[-1], ()) if self._last else ():
            if self._last[-len(start) :] == start:
                logits[token] = -np.inf
        if self._until_end > 0:
            logits[self._ends] = -np.inf
        if logits.max() == -np.inf:
            raise NoTokenLeft(NONE_LEFT)

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        self._until_end -= 1
        if self._longest:
            self._last = [*self._last, token][-self._longest :]


class Penalties:
    """Penalties of one answer on the tokens seen; with a `watch`, only within its think block.

    Repetition divides positive and multiplies negative logits (Keskar et al. 2019, section 4.1); presence
    and frequency subtract, as in OpenAI's API.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        prompt: Sequence[int],
        watch: ThinkingWatch | None = None,
    ) -> None:
        self._watch = watch
        self._repetition = np.float32(params.repetition_penalty)
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._counts: Counter[int] = Counter()
        """How often each token was generated, or is within the last `repeat_last_n`."""
        self._less = np.zeros(n_vocab, np.float32)
        """What presence and frequency penalties subtract from each token's logit."""
        self._repeated = np.zeros(n_vocab, bool)
        """Tokens seen in the prompt or after it. All False without a repetition penalty."""
        tokens = np.asarray(prompt, np.intp)
        tokens = tokens[(tokens >= 0) & (tokens < n_vocab)]
        if self._repetition != 1 and params.repeat_last_n is None:
            self._repeated[tokens] = True
        self._tokens = np.flatnonzero(self._repeated)
        """The tokens that have or had a penalty, each once; the first `_n` are in use."""
        self._n = len(self._tokens)
        self._window: deque[int] | None = None
        """The last tokens, if only these count."""
        if params.repeat_last_n is not None:
            seen = tokens.tolist()
            if params.repeat_last_n >= 0:
                seen = self._window = deque(seen, params.repeat_last_n)
            for token, count in Counter(seen).items():
                self._counted(token, count)

    @property
    def active(self) -> bool:
        return self._watch is None or self._watch.open

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Penalise a row in place. The time is proportional to the number of penalised tokens."""
        tokens = self._tokens[: self._n]
        logits[tokens] = self.applied(tokens, logits[tokens])

    def applied(
        self, tokens: npt.NDArray[np.integer], logits: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """The penalised logits of some tokens."""
        if self._repetition != 1:
            # the lower of quotient and product is the quotient if the logit is positive, else the product
            choose = np.minimum if self._repetition > 1 else np.maximum
            penalised = choose(logits / self._repetition, logits * self._repetition)
            logits = np.where(self._repeated[tokens], penalised, logits)
        if self._presence or self._frequency:
            logits = logits - self._less[tokens]
        return logits

    def accept(self, token: int) -> None:
        """Count a generated token."""
        if self._window is not None:
            if len(self._window) == self._window.maxlen:
                self._counted(self._window[0], -1)
            self._window.append(token)
        self._counted(token, 1)

    def _counted(self, token: int, more: int) -> None:
        known = self._repeated[token] or token in self._counts
        count = self._counts[token] = self._counts.get(token, 0) + more
        if not known:
            if self._n == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros(self._n + 64, np.intp)])
            self._tokens[self._n] = token
            self._n += 1
        self._less[token] = self._presence + self._frequency * count if count else 0
        if self._repetition != 1:
            self._repeated[token] = count > 0 or self._window is None
