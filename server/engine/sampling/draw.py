"""The sampler that carries out what a request says: from a row of logits to its next token."""

from __future__ import annotations

import math
import secrets
from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp import N_CANDIDATES, DeviceSampler, SamplerChain
from qwen_serve.server.engine.errors import NoTokenLeft

from .candidates import best_of, is_settled
from .parameters import SamplingParams
from .processors import NONE_LEFT, LogitRules, Penalties

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from qwen_serve.llamacpp import Rows
    from qwen_serve.server.engine.vocab import Vocab

    from .constraint import Constraint
    from .thinking import ThinkingWatch


class RowNotKept(Exception):
    """A row of logits is needed of which the device kept a part only: its token must be computed again."""

    chosen: list[int]
    """Tokens of a draft that were chosen from the rows before."""


class UnusableLogits(Exception):
    """The model computed no usable logits."""

    def __init__(self, why: str, chosen: list[int]) -> None:
        super().__init__(why)
        self.chosen = chosen
        """As in RowNotKept."""


class Sampler:
    """Chooses the tokens of one sequence. It outlives preemption, so a seeded draw goes on where it was.

    With a `constraint`, the choice is the one that the same parameters make when all tokens that may not come
    next have a logit of -inf. Where the best tokens alone were read out on the device, that is often known
    from them (`_from_candidates`); where it is not, the whole row is fetched.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab: Vocab,
        prompt: Sequence[int],
        constraint: Constraint | None = None,
        thinking: ThinkingWatch | None = None,
    ) -> None:
        self._n_real = vocab.n_real
        ends = sorted(vocab.eog_ids - params.stop_token_ids)
        self._banned = np.array(ends, np.intp) if params.ignore_eos else None
        self._never = frozenset(ends) if params.ignore_eos else frozenset()
        """The same."""
        penalised = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        self._penalties = Penalties(params, vocab.n_real, prompt) if penalised else None
        self._rules: LogitRules | None = None
        if LogitRules.wanted(params):
            self._rules = LogitRules(params, sorted(vocab.eog_ids | params.stop_token_ids), vocab.n_real)
        self._params = params
        self._top_k = params.top_k
        self._chain: SamplerChain | None = None
        if not params.is_greedy:
            seed = secrets.randbits(32) if params.seed is None else params.seed
            self._chain = SamplerChain(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=seed % 0xFFFFFFFF,  # llama.cpp takes 0xFFFFFFFF for "random"
            )
        self._constraint = constraint
        self._thinking = thinking
        self._thoughts: Penalties | None = None
        """Penalties within the think block, over what is in it."""
        if thinking is not None and thinking.limits.repetition_penalty != 1.0:
            penalty = thinking.limits.repetition_penalty
            self._thoughts = Penalties(SamplingParams(repetition_penalty=penalty), vocab.n_real, [])
        follow = (self._rules, self._penalties, self._thoughts)
        self._followers = [each for each in follow if each is not None]
        """Who is told of every token that was chosen, or forced."""
        self._forced: deque[int] = deque()
        """Tokens that come next whatever the model says."""
        self._failed: Exception | None = None
        """What kept `forced` from finding them."""
        self.need = self._least_sampler(params, len(vocab.eog_ids))
        """The least that the device has to tell about a row; more does as well."""
        if constraint is not None:
            self._force(constraint)

    def _least_sampler(self, params: SamplingParams, n_ends: int) -> DeviceSampler:
        penalties = [each for each in (self._penalties, self._thoughts) if each is not None]
        if self._rules is not None or not all(each.only_lower for each in penalties):
            return DeviceSampler.ROW  # any token may become the best
        if self._banned is not None and len(self._banned) < n_ends:
            return DeviceSampler.ROW  # the device bans all ends or none
        told = params.logprobs is not None
        if params.prompt_logprobs is not None or (told and self._constraint is not None):
            return DeviceSampler.ROW  # a token of a prompt, or a forced one, need not be among the best
        if penalties and (told or self._constraint is not None):
            return DeviceSampler.ROW  # nor need the best that is left
        if params.is_greedy and not told and not penalties:
            return DeviceSampler.BEST if self._constraint is None else DeviceSampler.TOP_K
        top_k = 1 if params.is_greedy else params.top_k
        candidates = top_k + (n_ends if params.ignore_eos else 0) + bool(penalties)  # the last is a bound
        if not top_k or candidates > N_CANDIDATES:
            return DeviceSampler.ROW
        return DeviceSampler.LOGPROBS if told else DeviceSampler.TOP_K

    def sample(self, rows: Rows, row: int) -> int:
        """The next token, from a row of what was decoded, whose device sampler must serve `need`.

        Raises FloatingPointError when the model computed no usable logits, RowNotKept when the whole row is
        needed and gone; then `need` is ROW from now on. And what the constraint raises.
        """
        if self._failed is not None:
            raise self._failed
        kind = rows.kinds[row]
        if self._forced:
            if self._params.logprobs is not None and kind is not DeviceSampler.ROW:
                self.need = DeviceSampler.ROW
                raise RowNotKept
            return self._forced.popleft()
        if self._constraint is not None:
            return self._constrained(rows, row, self._constraint)
        if kind is DeviceSampler.ROW:
            return self.choose(rows.logits(row))
        if kind is not DeviceSampler.BEST:
            chosen = self.choose_among(*rows.candidates(row))
            return self.choose(self._fetch(rows, row)) if chosen is None else chosen
        token = rows.best(row)
        if self._banned is not None and token in self._banned:
            return rows.best_but_end(row)
        return token

    def choose(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token of a row [n_vocab], which is changed, and counted among those seen."""
        token = self._draw_from_row(self._penalised(logits))
        self._count(token)
        return token

    def choose_among(self, ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> int | None:
        """The same from the best tokens, in any order; None where penalties may have made others better.
        `logits` may be changed.

        Penalties that only lower logits leave every other token at most where the least of these was.
        """
        penalties = self._in_force() if self._followers else ()
        lowest = float(logits.min()) if penalties else -math.inf
        for each in penalties:
            logits = each.applied(ids, logits)
        if self._never and not self._never.isdisjoint(ids.tolist()):
            logits[np.isin(ids, list(self._never))] = -np.inf
        if penalties:
            known = logits > lowest
            ids, logits = ids[known], logits[known]
            settled = ids.size > 0 if self._chain is None else is_settled(self._params, logits, lowest)
            if not settled:
                return None
        if self._chain is None:
            token = int(ids[logits == logits.max()].min())
        else:
            token = self._chain.draw(ids, logits)
        self._count(token)
        return token

    def forced(self, new: Sequence[int]) -> list[int]:
        """The answer has gained `new` tokens: those that come next without a row, if there are any. The
        caller appends them. With log-probabilities there are none: the model is asked what it thinks of them.

        Raises nothing, where all sequences would suffer: `sample` does, in its place.
        """
        if not self._forced and self._thinking is None:
            return []
        try:
            return self._find_forced(new)
        except Exception as error:
            self._failed = error
            return []

    def _find_forced(self, new: Sequence[int]) -> list[int]:
        asked = self._params.logprobs is not None
        forced = [] if asked else self._take_forced()
        watch, constraint = self._thinking, self._constraint
        if watch is not None and watch.open and watch.follow([*new, *forced] if forced else new):
            bridge = list(watch.limits.bridge)
            if constraint is not None:
                if constraint.validate(bridge) < len(bridge):
                    return forced  # not within a character: after the next token
                for token in bridge:
                    constraint.accept(token)
            watch.follow(bridge)
            for token in bridge:
                self._count(token)
            self._forced += bridge
            if constraint is not None:
                self._force(constraint)
            if not asked:
                forced += self._take_forced()
        return forced

    def _take_forced(self) -> list[int]:
        forced = list(self._forced)
        self._forced.clear()
        return forced

    @property
    def horizon(self) -> int | None:
        """Tokens of which none but the last can be followed by forced ones that a draft does not know of."""
        return None if self._thinking is None else self._thinking.horizon

    def _count(self, token: int) -> None:
        """A token was chosen, or forced."""
        for each in self._followers:
            each.accept(token)

    def validate(self, draft: list[int]) -> list[int]:
        """As much of a draft as may come next."""
        if self._forced:
            pairs = zip(draft, self._forced, strict=False)
            return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return draft if self._constraint is None else draft[: self._constraint.validate(draft)]

    def prepare(self, draft: Sequence[int]) -> None:
        """While the device computes the rows after what is pending, and after each token of a draft."""
        if self._constraint is not None and self._chain is not None and not self._forced:
            self._constraint.prepare(draft)  # the best token is nearly always allowed, which is asked sooner

    def _penalised(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The real tokens' logits of a row after penalties, without banned ones."""
        real = logits[: self._n_real]
        if self._banned is not None:
            real[self._banned] = -np.inf
        if self._rules is not None:
            self._rules.apply(real)
        for each in self._in_force():
            each.apply(real)
        token = int(real.argmax())
        if not math.isfinite(real[token]):  # a NaN anywhere wins the argmax
            raise FloatingPointError(f"the best of {real.size} logits is {real[token]}")
        return real

    def _in_force(self) -> list[Penalties]:
        """Those of the request; those of its thoughts as long as it thinks."""
        found = [] if self._penalties is None else [self._penalties]
        if self._thoughts is not None and self._thinking is not None and self._thinking.open:
            found.append(self._thoughts)
        return found

    def _fetch(self, rows: Rows, row: int) -> npt.NDArray[np.float32]:
        """The whole row of which the device told the best tokens. Raises RowNotKept."""
        logits = rows.fetch(row)
        if logits is None:
            self.need = DeviceSampler.ROW
            raise RowNotKept
        return logits

    def _draw_from_row(self, real: npt.NDArray[np.float32]) -> int:
        if self._chain is None:
            return int(real.argmax())
        ids = best_of(real, self._top_k) if self._top_k else np.arange(real.size, dtype=np.int32)
        return self._chain.draw(ids, real[ids] if self._top_k else real)

    # --- with a constraint ---------------------------------------------------------------------------------

    def _constrained(self, rows: Rows, row: int, constraint: Constraint) -> int:
        if rows.kinds[row] is not DeviceSampler.ROW:
            token = self._from_candidates(*rows.candidates(row), constraint)
            if token is None:
                token = self._from_mask(self._penalised(self._fetch(rows, row)), constraint)
        else:
            token = self._from_row(self._penalised(rows.logits(row)), constraint)
        self._count(token)
        self._force(constraint)
        return token

    def _force(self, constraint: Constraint) -> None:
        for token in constraint.forced():
            self._forced.append(token)
            self._count(token)

    def _from_row(self, real: npt.NDArray[np.float32], constraint: Constraint) -> int:
        """The choice from a whole row."""
        if self._chain is None:
            if constraint.accept(token := int(real.argmax())):
                return token
        elif not self._top_k:
            return self._from_mask(real, constraint)
        ids = best_of(real, max(N_CANDIDATES, self._top_k))
        found = self._from_candidates(ids.astype(np.int32), real[ids], constraint)
        return self._from_mask(real, constraint) if found is None else found

    def _from_mask(self, real: npt.NDArray[np.float32], constraint: Constraint) -> int:
        """The choice from all tokens of a row that may come next."""
        ids = np.flatnonzero(constraint.mask()[: real.size])
        logits = real[ids]
        if not logits.size or logits.max() == -np.inf:
            if self._rules is not None:
                raise NoTokenLeft(f"within the format, {NONE_LEFT}")
            raise FloatingPointError("no token that may come next has a probability")
        if self._chain is None:
            token = int(ids[logits.argmax()])
        else:
            if self._top_k:
                best = best_of(logits, self._top_k)
                ids, logits = ids[best], logits[best]
            token = self._chain.draw(ids, logits)
        self._accept(token, constraint)
        return token

    def _from_candidates(
        self, ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32], constraint: Constraint
    ) -> int | None:
        """The choice from the best tokens of a row, as it would be from the whole row; None where they do not
        say what it would be.

        Every other token has a logit of at most the least of theirs. The best are offered to the constraint
        one by one, which takes half a microsecond each; for a draw it is its mask that tells.
        """
        if self._chain is not None:
            return self._drawn(self._chain, ids, logits, constraint)
        order = logits.argsort()
        if logits[order[-1]] > logits[order[-2]]:
            best = int(ids[order[-1]])
            if best not in self._never and constraint.accept(best):
                return best
        order = np.lexsort((ids, -logits))  # of equal ones the lowest first
        lowest = logits[order[-1]]
        for token, logit in zip(ids[order].tolist(), logits[order].tolist(), strict=True):
            if logit <= lowest:
                break
            if token not in self._never and constraint.accept(token):
                return int(token)
        return None

    def _drawn(
        self,
        chain: SamplerChain,
        ids: npt.NDArray[np.int32],
        logits: npt.NDArray[np.float32],
        constraint: Constraint,
    ) -> int | None:
        mask = constraint.mask()
        if self._banned is not None:
            mask[self._banned] = False
        keep = mask[ids]
        n = np.count_nonzero(keep)
        if n < len(ids):
            lowest = logits.min()
            ids, logits = ids[keep], logits[keep]
            known = logits[logits > lowest]
            if not is_settled(self._params, known, float(lowest)) and n < np.count_nonzero(mask):
                return None
        if not n or logits.max() == -np.inf:
            return None
        token = chain.draw(ids, logits)
        self._accept(token, constraint)
        return token

    def _accept(self, token: int, constraint: Constraint) -> None:
        if not constraint.accept(token):
            raise RuntimeError(f"token {token} is in the mask of what may come next, but is refused")

    def close(self) -> None:
        """Free llama.cpp's part. Idempotent."""
        if self._chain is not None:
            self._chain.close()
