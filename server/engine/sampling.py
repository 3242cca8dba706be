"""How the next token is chosen: a request's parameters, and the sampler that carries them out."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .llama import N_CANDIDATES, DeviceSampler, SamplerChain

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from .llama import Rows
    from .vocab import Vocab


ALMOST_ZERO = 1e-5
"""Temperatures below would only take logits to infinity: they stand for the best token, as in vLLM."""


@dataclass(frozen=True)
class SamplingParams:
    """One request's choices; the defaults are greedy. Raises ValueError, naming the field.

    `temperature` 0 takes the best token. `top_k` 0, `top_p` 1 and `min_p` 0 are off. Penalties see what
    transformers and vLLM let them see, at any distance: `repetition_penalty` the prompt and the output,
    `presence_penalty` and `frequency_penalty` the output only. (llama-server's look back 64 tokens.)
    With `ignore_eos` no end-of-generation token is ever chosen. The same `seed` gives the same output;
    without one every request draws its own.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def require(field: str, ok: bool, wanted: str) -> None:
            if not ok:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be {wanted}")

        require("temperature", 0 <= self.temperature < math.inf, "a number from 0")
        require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        require("top_k", self.top_k >= 0, "0 (off) or more")
        require("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        # far from where a float32 overflows: a logit is divided by it
        require("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100")
        require("presence_penalty", math.isfinite(self.presence_penalty), "a finite number")
        require("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number")

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the best token, after penalties."""
        return self.temperature < ALMOST_ZERO or self.top_k == 1


class Sampler:
    """Chooses the tokens of one sequence. It outlives preemption, so a seeded draw goes on where it was."""

    def __init__(self, params: SamplingParams, vocab: Vocab, prompt: Sequence[int]) -> None:
        self._n_real = vocab.n_real
        self._banned = np.array(sorted(vocab.eog_ids), np.intp) if params.ignore_eos else None
        penalised = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        self._penalties = Penalties(params, vocab.n_real, prompt) if penalised else None
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
        self.need = self._least_sampler(params, len(vocab.eog_ids))
        """The least that the device has to tell about a row; more does as well."""

    def _least_sampler(self, params: SamplingParams, n_ends: int) -> DeviceSampler:
        if self._penalties is not None:
            return DeviceSampler.ROW  # any token may become the best
        if params.is_greedy:
            return DeviceSampler.BEST
        candidates = params.top_k + (n_ends if params.ignore_eos else 0)
        return DeviceSampler.TOP_K if params.top_k > 0 and candidates <= N_CANDIDATES else DeviceSampler.ROW

    def sample(self, rows: Rows, row: int) -> int:
        """The next token, from a row of what was decoded, whose device sampler must serve `need`.

        Raises FloatingPointError when the model computed no usable logits.
        """
        kind = rows.kinds[row]
        if kind is DeviceSampler.ROW:
            return self.choose(rows.logits(row))
        if kind is DeviceSampler.TOP_K:
            return self.choose_among(*rows.candidates(row))
        token = rows.best(row)
        if self._banned is not None and token in self._banned:
            return rows.best_but_end(row)
        return token

    def choose(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token, from all logits: shape [n_vocab], changed in place. Raises as `sample` does."""
        real = logits[: self._n_real]
        if self._banned is not None:
            real[self._banned] = -np.inf
        if self._penalties is not None:
            self._penalties.apply(real)
        token = int(real.argmax())
        if not math.isfinite(real[token]):  # a NaN anywhere wins the argmax
            raise FloatingPointError(f"the best of {real.size} logits is {real[token]}")
        if self._chain is not None:
            ids = best_of(real, self._top_k) if self._top_k else np.arange(real.size, dtype=np.int32)
            token = self._chain.draw(ids, real[ids] if self._top_k else real)
        if self._penalties is not None:
            self._penalties.accept(token)
        return token

    def choose_among(self, ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> int:
        """The same from the best tokens, in any order: enough without penalties. `logits` are changed."""
        if self._banned is not None:
            logits[np.isin(ids, self._banned)] = -np.inf
        if self._chain is None:
            return int(ids[logits.argmax()])
        return self._chain.draw(ids, logits)

    def close(self) -> None:
        """Free llama.cpp's part. Idempotent."""
        if self._chain is not None:
            self._chain.close()


def best_of(logits: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """Ids of the `k` highest of many logits [n], in no order; all of them if there are no more.

    The k-th highest of the maxima of blocks is a bound that at least k reach and few pass: one look at
    everything, where a partial sort would move it.
    """
    width = 256
    n_blocks = len(logits) // width
    if k >= len(logits):
        return np.arange(len(logits))
    ids = np.arange(len(logits))
    if n_blocks > 4 * k:
        maxima = logits[: n_blocks * width].reshape(n_blocks, width).max(axis=1)
        ids = np.flatnonzero(logits >= np.partition(maxima, -k)[-k])
    return ids[np.argpartition(logits[ids], -k)[-k:]] if len(ids) > k else ids


class Penalties:
    """Keeps the distinct tokens seen and their counts, so that a step costs as many operations as those.

    Repetition divides positive and multiplies negative logits (Keskar et al. 2019, section 4.1); presence
    and frequency subtract, as in OpenAI's API.
    """

    def __init__(self, params: SamplingParams, n_vocab: int, prompt: Sequence[int]) -> None:
        self._params = params
        self._in_prompt = np.zeros(n_vocab, bool)
        in_vocab = np.asarray(prompt, np.intp)
        self._in_prompt[in_vocab[in_vocab < n_vocab]] = True
        self._prompt_only = np.flatnonzero(self._in_prompt)
        self._slot: dict[int, int] = {}  # token -> its place in the two arrays below
        self._tokens = np.zeros(64, np.intp)
        self._counts = np.zeros(64, np.float32)

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Penalise a row in place."""
        params, n = self._params, len(self._slot)
        tokens = self._tokens[:n]
        if params.repetition_penalty != 1.0:
            new = tokens[~self._in_prompt[tokens]]
            for group in (self._prompt_only, new):
                values = logits[group]
                factor = np.float32(params.repetition_penalty)
                logits[group] = np.where(values > 0, values / factor, values * factor)
        if n and (params.presence_penalty or params.frequency_penalty):
            logits[tokens] -= params.presence_penalty + params.frequency_penalty * self._counts[:n]

    def accept(self, token: int) -> None:
        """Count a generated token."""
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[slot] = token
        self._counts[slot] += 1
