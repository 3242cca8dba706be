"""One request's sampler: applies its parameters to a row of logits and chooses the next token."""

from __future__ import annotations

import secrets
from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING

from .native import NativeSampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from qwen_serve.llamacpp import DrySampler
    from qwen_serve.llamacpp.row_results import RowResult
    from qwen_serve.llamacpp.row_sampler import Bits, RowRequest, RowSampler
    from qwen_serve.server.engine.sampling.rows import Rows
    from qwen_serve.server.engine.vocab import Vocab

    from .constraint import Constraint
    from .logprobs import Logprobs
    from .parameters import SamplingParams
    from .thinking import ThinkingWatch


class Sampler:
    """Chooses the tokens of one sequence. It survives preemption, so a seeded draw continues where it was.

    With a `constraint`, the choice is as if all tokens that may not come next had a logit of -inf.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab: Vocab,
        prompt: Sequence[int],
        constraint: Constraint | None = None,
        thinking: ThinkingWatch | None = None,
        dry: DrySampler | None = None,
    ) -> None:
        """`dry` must be new and belong to this answer only; required if the request uses DRY."""
        self.params = params
        self._constraint, self._thinking = constraint, thinking
        banned = vocab.eog_ids - params.stop_token_ids if params.ignore_eos else frozenset()
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._native = NativeSampler(params, seed, vocab, prompt, banned, thinking, dry)
        self._forced: deque[int] = deque()
        """Tokens that come next regardless of the model."""
        if constraint is not None:
            self._force(constraint.forced())

    @property
    def noise(self) -> RowSampler:
        """What drafters choose with: drafts by the same noise are likelier to be accepted."""
        return self._native.sampler

    def constrained(self, draft: Sequence[int]) -> tuple[Constraint, Sequence[int]] | None:
        """The constraint whose masks `requests` needs, and the part of the draft that it has not accepted."""
        if self._constraint is None or len(self._forced) > len(draft):
            return None
        return self._constraint, draft[len(self._forced) :]

    def requests(self, draft: Sequence[int], n_top: int, masks: Sequence[Bits]) -> list[RowRequest]:
        """Requests for the row after the pending tokens, and for those after each token of a draft. `n_top`:
        the likeliest tokens with log-probabilities, or -1 for none. `masks`: for what `constrained` gives."""
        return self._native.requests(list(self._forced) if self._forced else (), draft, masks, n_top)

    def request_score(self, token: int, n_top: int) -> RowRequest:
        """A request for the log-probability of a prompt's `token`, which follows the row."""
        return self._native.request_score(token, n_top)

    def choose(self, rows: Rows, row: int, logprobs: Logprobs | None = None) -> int | None:
        """The next token, from a decoded row. Its log-probabilities are added to `logprobs`.

        None if the row was not kept, or if it was sampled before a token was forced whose log-probability is
        wanted. Raises FloatingPointError if the logits are unusable, NoTokenLeft, and what the constraint
        raises.
        """
        result = self._native.check(rows.result(row), constrained=self._constraint is not None)
        if result is None or (self._forced and logprobs is not None and result.token != self._forced[0]):
            return None
        token = self._forced.popleft() if self._forced else self._accept(result)
        if logprobs is not None:
            logprobs.tokens.append(result)
        return token

    def score(self, rows: Rows, row: int, logprobs: Logprobs) -> None:
        """Add the log-probability of the prompt's token that follows the row to `logprobs`."""
        if (result := self._native.check(rows.result(row), constrained=False)) is not None:
            logprobs.prompt.append(result)

    def _accept(self, result: RowResult) -> int:
        token, constraint = result.token, self._constraint
        self._native.observe(result)
        if constraint is not None and not constraint.accept(token):
            raise RuntimeError(f"token {token} is in the mask of what may come next, but is refused")
        self._native.accept(token)
        if constraint is not None:
            self._force(constraint.forced())
        return token

    def forced(self, new: Sequence[int], *, one_by_one: bool = False) -> list[int]:
        """Add the answer's `new` tokens, and return the forced tokens that follow, if there are any. They are
        accepted already.

        With log-probabilities, or with `one_by_one`, they come from the next rows instead. Raises what the
        constraint raises.
        """
        if not self._forced and self._thinking is None:
            return []
        one_by_one = one_by_one or self.params.logprobs is not None
        forced = [] if one_by_one else self._take_forced()
        if self._thinking is not None and self._thinking.follow([*new, *forced] if forced else new):
            self._end_thoughts(self._thinking)
            forced += [] if one_by_one else self._take_forced()
        return forced

    @property
    def may_force(self) -> bool:
        """Whether tokens may be forced right after the next one."""
        closes = self._thinking is not None and self._thinking.horizon == 1
        return self._constraint is not None or bool(self._forced) or closes

    @property
    def horizon(self) -> int | None:
        """Number of next tokens before the first place at which the think block's limits may force tokens
        that a draft does not know, or at which a choice depends on the one before; None: any number."""
        if self._native.follows_choices:
            return 1
        return None if self._thinking is None else self._thinking.horizon

    @property
    def takes_any(self) -> bool:
        """Whether `validate` takes every draft."""
        return self._constraint is None and not self._forced

    def validate(self, draft: list[int]) -> list[int]:
        """The first tokens of a draft, as far as they may come next."""
        if self._forced:
            pairs = zip(draft, self._forced, strict=False)
            return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return draft if self._constraint is None else draft[: self._constraint.validate(draft)]

    def close(self) -> None:
        """Free llama.cpp's part, when the answer has ended. Idempotent."""
        self._native.close()

    # --- forced tokens -------------------------------------------------------------------------------------

    def _force(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._forced.append(token)
            self._native.accept(token)

    def _take_forced(self) -> list[int]:
        forced = list(self._forced)
        self._forced.clear()
        return forced

    def _end_thoughts(self, watch: ThinkingWatch) -> None:
        bridge, constraint = list(watch.limits.bridge), self._constraint
        if constraint is not None:
            if constraint.validate(bridge) < len(bridge):
                return  # in the middle of a character: tried again after the next token
            for token in bridge:
                constraint.accept(token)
        watch.follow(bridge)
        self._force(bridge)
        if constraint is not None:
            self._force(constraint.forced())
