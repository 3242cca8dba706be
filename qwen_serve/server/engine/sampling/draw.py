"""One request's sampler: applies its parameters to a row of logits and chooses the next token."""

from __future__ import annotations

import math
import secrets
from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp import SamplerChain
from qwen_serve.llamacpp.row_sampler import HAS_ROW_SAMPLER, NO_LOGITS, RowRequest
from qwen_serve.server.engine.errors import NoTokenLeft

from .chain import samplers_of
from .dry import Dry
from .logprobs import best_of
from .native import NativeSampler
from .parameters import SamplingParams
from .processors import NONE_LEFT, LogitRules, Penalties

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from qwen_serve.llamacpp import DrySampler
    from qwen_serve.llamacpp.row_results import RowResult
    from qwen_serve.llamacpp.row_sampler import Bits, RowSampler
    from qwen_serve.server.engine.sampling.rows import Rows
    from qwen_serve.server.engine.vocab import Vocab

    from .constraint import Constraint
    from .logprobs import Logprobs
    from .thinking import ThinkingWatch

NO_SEED = 0xFFFFFFFF
"""llama.cpp takes it for "random"."""


class Sampler:
    """Chooses the tokens of one sequence. It survives preemption, so a seeded draw continues where it was.

    With a `constraint`, the choice is as if all tokens that may not come next had a logit of -inf.
    `RowSampler` samples where rows are computed. In a llama.cpp without it, llama.cpp's samplers choose from
    whole rows on the host.
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
        self.params, self._n_real = params, vocab.n_real
        self._constraint, self._thinking = constraint, thinking
        self._banned = vocab.eog_ids - params.stop_token_ids if params.ignore_eos else frozenset()
        self._native: NativeSampler | None = None
        self._rules: LogitRules | None = None
        self._penalties: list[Penalties | Dry] = []
        self._processors: list[LogitRules | Penalties | Dry] = []
        self._chain: SamplerChain | None = None
        """None if the best token is chosen."""
        self._top_k = params.top_k if params.chain[:1] == ("top_k",) else 0
        """The chain considers only this many best tokens; 0: perhaps all."""
        seed = secrets.randbits(63) if params.seed is None else params.seed
        if HAS_ROW_SAMPLER:
            self._native = NativeSampler(params, seed, vocab, prompt, self._banned, thinking, dry)
        else:
            self._use_llama_cpp(seed % NO_SEED, vocab, prompt, dry)
        self._forced: deque[int] = deque()
        """Tokens that come next regardless of the model."""
        if constraint is not None:
            self._force(constraint.forced())

    def _use_llama_cpp(self, seed: int, vocab: Vocab, prompt: Sequence[int], dry: DrySampler | None) -> None:
        params, thinking = self.params, self._thinking
        if LogitRules.wanted(params):
            self._rules = LogitRules(params, sorted(vocab.eog_ids | params.stop_token_ids), vocab.n_real)
        for name in params.on_rows:
            if name == "penalties":
                self._penalties.append(Penalties(params, vocab.n_real, prompt))
            else:
                assert dry is not None
                self._penalties.append(Dry(dry, params, vocab.n_real, prompt))
        if thinking is not None and (penalty := thinking.limits.repetition_penalty) != 1.0:
            within = SamplingParams(repetition_penalty=penalty)
            self._penalties.append(Penalties(within, vocab.n_real, [], thinking))
        rules = [] if self._rules is None else [self._rules]
        self._processors = [*rules, *self._penalties]
        if not params.is_greedy:
            self._chain = SamplerChain(samplers_of(params, seed, vocab.size))

    @property
    def noise(self) -> RowSampler | None:
        """What drafters choose with: drafts by the same noise are likelier to be accepted. None: the best
        tokens."""
        return None if self._native is None else self._native.sampler

    def constrained(self, draft: Sequence[int]) -> tuple[Constraint, Sequence[int]] | None:
        """The constraint whose masks `requests` needs, and the part of the draft that it has not accepted."""
        if self._constraint is None or self._native is None or len(self._forced) > len(draft):
            return None
        return self._constraint, draft[len(self._forced) :]

    def requests(self, draft: Sequence[int], n_top: int, masks: Sequence[Bits]) -> list[RowRequest]:
        """Requests for the row after the pending tokens, and for those after each token of a draft. `n_top`:
        the likeliest tokens with log-probabilities, or -1 for none. `masks`: for what `constrained` gives."""
        if self._native is None:
            return [RowRequest(None) for _ in range(len(draft) + 1)]
        return self._native.requests(list(self._forced) if self._forced else (), draft, masks, n_top)

    def request_score(self, token: int, n_top: int) -> RowRequest:
        """A request for the log-probability of a prompt's `token`, which follows the row."""
        return RowRequest(None) if self._native is None else self._native.request_score(token, n_top)

    def choose(self, rows: Rows, row: int, logprobs: Logprobs | None = None) -> int | None:
        """The next token, from a decoded row. Its log-probabilities are added to `logprobs`.

        None if the row was not kept, or if it was sampled before a token was forced whose log-probability is
        wanted. Raises FloatingPointError if the logits are unusable, NoTokenLeft, and what the constraint
        raises.
        """
        if self._native is not None:
            result = self._native.check(rows.result(row), constrained=self._constraint is not None)
            if result is None or (self._forced and logprobs is not None and result.token != self._forced[0]):
                return None
            token = self._forced.popleft() if self._forced else self._accept_choice(result)
            if logprobs is not None:
                logprobs.tokens.append(result)
            return token
        logits = usable(rows.whole(row))
        whole = logits.copy() if logprobs is not None else logits
        if self._forced:
            token = self._forced.popleft()
        else:
            token = self._from_row(self._processed(logits))
            self._accept(token)
        if logprobs is not None:
            logprobs.add(whole, token)
        return token

    def score(self, rows: Rows, row: int, token: int, logprobs: Logprobs) -> None:
        """Add the log-probability of a prompt's `token`, which follows the row, to `logprobs`."""
        if self._native is None:
            logprobs.add_prompt(usable(rows.whole(row)), token)
        elif (result := self._native.check(rows.result(row), constrained=False)) is not None:
            logprobs.prompt.append(result)

    def _accept_choice(self, result: RowResult) -> int:
        assert self._native is not None
        token = result.token
        self._native.observe(result)
        if self._constraint is not None and not self._constraint.accept(token):
            raise RuntimeError(f"token {token} is in the mask of what may come next, but is refused")
        self._accept(token)
        return token

    def _accept(self, token: int) -> None:
        self._follow(token)
        if self._constraint is not None:
            self._force(self._constraint.forced())

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
        if self._native is not None and self._native.follows_choices:
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
        for each in self._processors:
            if isinstance(each, Dry):
                each.close()
        if self._chain is not None:
            self._chain.close()
        if self._native is not None:
            self._native.close()

    # --- forced tokens -------------------------------------------------------------------------------------

    def _force(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._forced.append(token)
            self._follow(token)

    def _follow(self, token: int) -> None:
        for each in self._processors:
            each.accept(token)
        if self._native is not None:
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

    # --- the choice ----------------------------------------------------------------------------------------

    def _processed(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """A row's [n_vocab] logits of real tokens, processed in place: banned ones have -inf."""
        real = logits[: self._n_real]
        if self._banned:
            real[list(self._banned)] = -np.inf
        if self._rules is not None:
            self._rules.apply(real)
        for each in self._penalties:
            if each.active:
                each.apply(real)
        token = int(real.argmax())
        if not math.isfinite(real[token]):  # argmax returns a NaN if there is one
            raise FloatingPointError(f"the best of {real.size} logits is {real[token]}")
        return real

    def _from_row(self, real: npt.NDArray[np.float32]) -> int:
        """The choice from a whole row. With a constraint the best token is tried first, since that may save
        computing the mask of all allowed tokens."""
        constraint = self._constraint
        if constraint is not None and self._chain is None and constraint.accept(token := int(real.argmax())):
            return token
        return self._from_allowed(real)

    def _from_allowed(self, real: npt.NDArray[np.float32]) -> int:
        """The choice from all allowed tokens of a row."""
        ids, logits, constraint, top_k = None, real, self._constraint, self._top_k
        if constraint is not None:
            ids = np.flatnonzero(constraint.mask()[: real.size])
            logits = real[ids]
            if not logits.size or logits.max() == -np.inf:
                if self._rules is not None:
                    raise NoTokenLeft(f"within the format, {NONE_LEFT}")
                raise FloatingPointError("no token that may come next has a probability")
        if self._chain is None:
            best = int(logits.argmax())
            token = best if ids is None else int(ids[best])
        else:
            if top_k:
                best_ids = best_of(logits, top_k)
                ids, logits = best_ids if ids is None else ids[best_ids], logits[best_ids]
            token = self._chain.draw(np.arange(real.size, dtype=np.int32) if ids is None else ids, logits)
        if constraint is not None and not constraint.accept(token):
            raise RuntimeError(f"token {token} is in the mask of what may come next, but is refused")
        return token


def usable(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The logits of a row. Raises FloatingPointError if they are not finite, or all 0."""
    with np.errstate(invalid="ignore"):
        total = float(logits.sum())
    if not math.isfinite(total):
        raise FloatingPointError(NO_LOGITS.format(f"they add up to {total}"))
    if not logits.any():  # stops at the first that is not 0
        raise FloatingPointError(NO_LOGITS.format("all are 0"))
    return logits
