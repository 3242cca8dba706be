"""DRY ("don't repeat yourself"): llama.cpp's penalty on tokens that would continue a repetition."""

from collections.abc import Sequence
from threading import Lock

import numpy as np
from cachetools import LRUCache

from qwen_serve.llamacpp import DrySampler, Model
from qwen_serve.llamacpp.row_sampler import Lowered

from .parameters import SamplingParams

KEPT = 32
"""Maximum cached DRY samplers, one for each combination of parameters, of about 100 KB each."""


class DrySamplers:
    """Makes the DRY samplers of one model; any thread may call it. Searching every token for sequence
    breakers takes a tenth of a second, so requests with the same DRY parameters share that work."""

    def __init__(self, model: Model, context_size: int) -> None:
        self._model, self._context_size = model, context_size
        self._made: LRUCache[tuple[object, ...], DrySampler] = LRUCache(KEPT)
        self._lock = Lock()

    def of(self, params: SamplingParams) -> DrySampler | None:
        """A new sampler for one answer; None if the request does not use DRY. The first one with these
        parameters is slow to make."""
        if "dry" not in params.on_rows:
            return None
        last_n = params.dry_penalty_last_n
        last_n = self._context_size if last_n < 0 else min(last_n, self._context_size)
        how = params.dry_multiplier, params.dry_base, params.dry_allowed_length, last_n
        breakers = params.dry_sequence_breakers
        with self._lock:
            made = self._made.get((*how, breakers))
        if made is None:
            made = DrySampler.made(self._model, *how, breakers)
            with self._lock:
                self._made[(*how, breakers)] = made
        return made.copy()


class Dry:
    """DRY penalties of one answer."""

    def __init__(
        self, sampler: DrySampler, params: SamplingParams, n_vocab: int, prompt: Sequence[int]
    ) -> None:
        self._sampler = sampler
        self._first = params.on_rows[:1] == ("dry",)
        """Whether it comes before the other penalties."""
        tokens = np.asarray(prompt, np.intp)
        tokens = tokens[(tokens >= 0) & (tokens < n_vocab)]
        if params.dry_penalty_last_n >= 0:
            tokens = tokens[max(0, len(tokens) - params.dry_penalty_last_n) :]
        self._seen = np.zeros(n_vocab, bool)
        self._seen[tokens] = True
        for token in tokens.tolist():
            sampler.accept(token)

    def lowered(self, draft: Sequence[int]) -> Lowered | None:
        """What it subtracts in the row behind the answer and a draft; None for nothing. Only seen tokens can
        continue a repetition."""
        sampler = self._sampler.copy() if draft else self._sampler
        seen = self._seen.copy() if draft else self._seen
        for token in draft:
            sampler.accept(token)
            seen[token] = True
        ids = np.flatnonzero(seen).astype(np.int32)
        less = sampler.less(ids)
        penalised = less > 0
        return Lowered(ids[penalised], less[penalised], self._first) if penalised.any() else None

    def accept(self, token: int) -> None:
        """Add the next token of the answer."""
        self._seen[token] = True
        self._sampler.accept(token)

    def close(self) -> None:
        """Free llama.cpp's part. Idempotent."""
        self._sampler.close()
