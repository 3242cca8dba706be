"""A request's samplers, rules and penalties as `RowSampler` applies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp import DeviceSampler
from qwen_serve.llamacpp.row_sampler import (
    HAS_ROW_SAMPLER,
    Filters,
    RowRequest,
    RowResult,
    RowSampler,
    Status,
)
from qwen_serve.llamacpp.rows import NO_LOGITS
from qwen_serve.server.engine.errors import NoTokenLeft

from .processors import NONE_LEFT

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from qwen_serve.llamacpp import Rows
    from qwen_serve.server.engine.vocab import Vocab

    from .choices import Choice
    from .constraint import Constraint
    from .parameters import SamplingParams
    from .thinking import ThinkingWatch


def applies_to(params: SamplingParams) -> bool:
    """Whether `RowSampler` has all that a request asks for. Other requests have llama.cpp's samplers."""
    if not HAS_ROW_SAMPLER or params.mirostat or "dry" in params.on_rows:
        return False
    return params.is_greedy or (params.min_keep <= 1 and not params.dynatemp_range)


class NativeSampler:
    """Chooses the tokens of one answer. `accept` takes its tokens in order, forced ones too."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab: Vocab,
        prompt: Sequence[int],
        banned: Collection[int],
        thinking: ThinkingWatch | None,
    ) -> None:
        self._greedy, self._n_real = params.is_greedy, vocab.n_real
        self._thinking, self._within = thinking, -1
        self._hidden = False
        """Whether tokens that are not among the device's candidates may be chosen."""
        self._rules = bool(
            params.logit_bias or params.bad_words or params.min_tokens or params.allowed_token_ids
        )
        self._sampler = sampler = RowSampler(_filters(params, seed), vocab.n_real)
        sampler.ban(banned)
        sampler.bias(params.logit_bias)
        if params.allowed_token_ids is not None:
            sampler.allow(params.allowed_token_ids)
        for word in params.bad_words:
            sampler.bad_word(word)
        if params.min_tokens:
            sampler.ban(sorted(vocab.eog_ids | params.stop_token_ids), params.min_tokens)
        if "penalties" in params.on_rows:
            how = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            sampler.penalise(*how, params.repeat_last_n, prompt)
            self._hidden = True
        if thinking is not None and (penalty := thinking.limits.repetition_penalty) != 1.0:
            self._within = sampler.penalise(penalty, 0.0, 0.0, None, [])
            self._hidden = True

    def choose(
        self, rows: Rows, row: int, constraint: Constraint | None, number: float, n_top: int
    ) -> Choice[RowResult]:
        """The choice from a row whose device sampler is at least TOP_K. `number` and `n_top` as for
        `RowRequest`. Raises as `Sampler.choose` does."""
        if self._within >= 0 and self._thinking is not None:
            self._sampler.set_active(self._within, self._thinking.open)
        request = RowRequest(self._sampler, np.zeros(0, np.float32), number=number, n_top=n_top)
        if rows.kinds[row] is DeviceSampler.ROW:
            request.logits = rows.unchecked(row)
        else:
            request.ids, request.logits = rows.candidates(row)
            if self._hidden or constraint is not None:
                request.lowest = float(np.minimum.reduce(request.logits))
        if constraint is not None and self._greedy:  # the best token is nearly always allowed
            [result] = yield [request]
            if result.status is Status.OK and constraint.accept(result.token):
                return result
        if constraint is not None:
            request.mask = constraint.mask()
        [result] = yield [request]
        if result.status is Status.UNSETTLED:
            request.ids, request.logits = None, rows.fetch(row)
            [result] = yield [request]
        self._check(result.status)
        if constraint is not None and not constraint.accept(result.token):
            raise RuntimeError(f"token {result.token} is in the mask of what may come next, but is refused")
        return result

    def score(self, rows: Rows, row: int, token: int, n_top: int) -> Choice[RowResult]:
        """The log-probability of a token, from a whole row."""
        [result] = yield [RowRequest(self._sampler, rows.unchecked(row), n_top=n_top, scored=token)]
        self._check(result.status)
        return result

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        self._sampler.accept(token)

    def close(self) -> None:
        """Free its memory. Idempotent."""
        self._sampler.close()

    def _check(self, status: Status) -> None:
        if status is Status.NONE_LEFT:
            raise NoTokenLeft(NONE_LEFT)
        if status is Status.NONE_FITS:
            if self._rules:
                raise NoTokenLeft(f"within the format, {NONE_LEFT}")
            raise FloatingPointError("no token that may come next has a probability")
        if status is not Status.OK:
            why = "all are 0" if status is Status.ZERO else "some are not finite"
            raise FloatingPointError(NO_LOGITS.format(why))


def _filters(params: SamplingParams, seed: int) -> Filters:
    if params.is_greedy:
        return Filters(("best",))
    return Filters(
        params.chain,
        seed,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.typical_p,
        params.top_n_sigma,
        params.xtc_probability,
        params.xtc_threshold,
    )
