"""One request's sampler: applies its parameters to a row of logits and chooses the next token."""

from __future__ import annotations

import math
import secrets
from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp import N_CANDIDATES, DeviceSampler, SamplerChain
from qwen_serve.llamacpp.samplers import RandomNumbers
from qwen_serve.server.engine.errors import NoTokenLeft

from .candidates import best_of, can_guess, choose_among, device_sampler_for, draw_of
from .chain import samplers_of
from .choices import choose
from .dry import Dry
from .logprobs import of_result
from .native import NativeSampler, applies_to
from .parameters import SamplingParams
from .processors import NONE_LEFT, LogitRules, Penalties

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from qwen_serve.llamacpp import DrySampler, Rows
    from qwen_serve.server.engine.vocab import Vocab

    from .choices import Choice
    from .constraint import Constraint
    from .logprobs import Logprobs
    from .thinking import ThinkingWatch

NO_SEED = 0xFFFFFFFF
"""llama.cpp takes it for "random"."""


class Sampler:
    """Chooses the tokens of one sequence. It survives preemption, so a seeded draw continues where it was.

    With a `constraint`, the choice is as if all tokens that may not come next had a logit of -inf. The best
    tokens of a row, which the device finds, often suffice for the choice (`choose_among`); if not, the whole
    row is fetched.
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
        self.forces = constraint is not None or thinking is not None
        """Whether `forced` may return tokens."""
        self._banned = vocab.eog_ids - params.stop_token_ids if params.ignore_eos else frozenset()
        self.ignores_ends = bool(self._banned)
        """Whether some or all of the tokens that end a generation are excluded from the choice."""
        within = 1.0 if thinking is None else thinking.limits.repetition_penalty
        self._penalised = bool(params.on_rows) or within != 1
        self.need = device_sampler_for(
            params,
            penalised=self._penalised,
            only_lowers=params.only_lowers and within >= 1,
            constrained=constraint is not None,
            ends=len(vocab.eog_ids),
            banned=len(self._banned),
        )
        """The narrowest device sampler that suffices; wider ones do too."""
        plain = constraint is None and not self._penalised and self.need <= DeviceSampler.TOP_K
        self.draw = draw_of(params, no_ends=self.ignores_ends) if plain else None
        """How TOP_K can guess the next tokens; None if it cannot."""
        self.never_fetches = self.need is DeviceSampler.ROW or not (self._penalised or constraint)
        """Whether the result of the device sampler always suffices for the choice."""
        self._native: NativeSampler | None = None
        self._rules: LogitRules | None = None
        self._penalties: list[Penalties | Dry] = []
        self._processors: list[LogitRules | Penalties | Dry] = []
        self._chain: SamplerChain | None = None
        """None if the best token is chosen."""
        self._top_k = params.top_k if params.chain[:1] == ("top_k",) else 0
        """The chain considers only this many best tokens; 0: perhaps all."""
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._numbers = RandomNumbers(seed % NO_SEED) if can_guess(params) else None
        """The random numbers of draws that the device can guess."""
        if applies_to(params):
            self._native = NativeSampler(params, seed, vocab, prompt, self._banned, thinking)
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

    def sample(self, rows: Rows, row: int) -> int | None:
        """The next token, from a decoded row; as `choose`."""
        [token] = choose([self.choose(rows, row)])
        return token

    def choose(self, rows: Rows, row: int, logprobs: Logprobs | None = None) -> Choice[int | None]:
        """The next token, from a decoded row whose device sampler must serve `need`. Its log-probabilities
        are added to `logprobs`.

        None if the device returned too little for the log-probability of a forced token: pending tokens must
        be computed again, and `need` is ROW from now on. Raises FloatingPointError if the logits are
        unusable, LlamaError if a whole row cannot be had, NoTokenLeft, and what the constraint raises.
        """
        kind, native = rows.kinds[row], self._native
        whole = kind is DeviceSampler.ROW
        n_top = logprobs.n_top if logprobs is not None and whole and native is not None else -1
        scores = logprobs.scores(rows, row) if logprobs is not None and n_top < 0 else None
        if self._forced:
            if not whole and self.params.logprobs is not None:
                self.need = DeviceSampler.ROW  # its log-probability may not be among the candidates'
                return None
            token = self._forced.popleft()
            if n_top >= 0 and logprobs is not None and native is not None:
                logprobs.tokens.append(of_result((yield from native.score(rows, row, token, n_top))))
        elif kind is DeviceSampler.BEST:
            token = rows.best(row)
            return rows.best_but_end(row) if token in self._banned else token
        elif native is not None:
            number = -1.0 if self._numbers is None else float(self._numbers.next(1)[0])
            result = yield from native.choose(rows, row, self._constraint, number, n_top)
            token = result.token
            if n_top >= 0 and logprobs is not None:
                logprobs.tokens.append(of_result(result))
            self._accept(token)
        else:
            token = self._from_llama_cpp(rows, row)
            self._accept(token)
        if scores is not None and logprobs is not None:
            logprobs.add(scores, token)
        return token

    def score(self, rows: Rows, row: int, token: int, logprobs: Logprobs) -> Choice[None]:
        """Add the log-probability of a prompt's `token`, which follows the row, to `logprobs`."""
        if self._native is None:
            logprobs.add_prompt(rows.logits(row), token)
        else:
            logprobs.prompt.append(
                of_result((yield from self._native.score(rows, row, token, logprobs.n_prompt_top)))
            )

    def _from_llama_cpp(self, rows: Rows, row: int) -> int:
        if rows.kinds[row] is DeviceSampler.ROW:
            return self._from_row(self._processed(rows.logits(row)))
        found = self._from_candidates(*rows.candidates(row))
        return self._from_allowed(self._processed(rows.fetch(row))) if found is None else found

    def _accept(self, token: int) -> None:
        if self._numbers is not None:
            self._numbers.drawn += 1
        self._follow(token)
        if self._constraint is not None:
            self._force(self._constraint.forced())

    def numbers(self, n: int) -> npt.NDArray[np.float64]:
        """The random numbers of the next `n` draws; any if nothing is drawn."""
        return np.zeros(n) if self._numbers is None else self._numbers.next(n)

    def forced(self, new: Sequence[int]) -> list[int]:
        """Add the answer's `new` tokens, and return the forced tokens that follow, if there are any.

        With log-probabilities no tokens are forced, since the model must compute those of each token. Raises
        what the constraint raises.
        """
        if not self._forced and self._thinking is None:
            return []
        forced = self._take_forced()
        if self._thinking is not None and self._thinking.follow([*new, *forced] if forced else new):
            self._end_thoughts(self._thinking)
            forced += self._take_forced()
        return forced

    @property
    def may_force(self) -> bool:
        """Whether tokens may be forced right after the next one."""
        return self._constraint is not None or bool(self._forced) or self.horizon == 1

    @property
    def horizon(self) -> int | None:
        """Number of next tokens before the first place at which the think block's limits may force tokens
        that a draft does not know; None: any number."""
        return None if self._thinking is None else self._thinking.horizon

    def validate(self, draft: list[int]) -> list[int]:
        """The first tokens of a draft, as far as they may come next."""
        if self._forced:
            pairs = zip(draft, self._forced, strict=False)
            return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return draft if self._constraint is None else draft[: self._constraint.validate(draft)]

    def prepare(self, draft: Sequence[int]) -> None:
        """Prepare the constraint while the device computes the rows of pending tokens and of a draft."""
        if self._constraint is not None and not self.params.is_greedy and not self._forced:
            self._constraint.prepare(draft)  # if greedy, the best token is nearly always allowed

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
        if self.params.logprobs is not None:
            return []
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

    def _from_candidates(self, ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> int | None:
        """The choice from the device's best tokens [n]; None if they do not determine it."""
        lowest = -math.inf  # top-k takes no others
        if self._penalties or self._constraint is not None:
            lowest = float(np.minimum.reduce(logits))  # faster than min()
            for each in self._penalties:
                if each.active:
                    logits = each.applied(ids, logits)
        if self._banned and not self._banned.isdisjoint(ids.tolist()):
            logits = np.where(np.isin(ids, list(self._banned)), np.float32(-np.inf), logits)
        return choose_among(ids, logits, lowest, self.params, self._chain, self._constraint)

    def _from_row(self, real: npt.NDArray[np.float32]) -> int:
        """The choice from a whole row. With a constraint the best tokens are tried first, since that may save
        computing the mask of all allowed tokens."""
        constraint, top_k = self._constraint, self._top_k
        if constraint is not None and (self._chain is None or top_k):
            if self._chain is None and constraint.accept(token := int(real.argmax())):
                return token
            ids = best_of(real, max(N_CANDIDATES, top_k))
            best = real[ids]
            found = choose_among(ids, best, float(best.min()), self.params, self._chain, constraint)
            if found is not None:
                return found
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
