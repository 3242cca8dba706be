"""`RowSampler` and `RowSteps` in numpy, for a llama.cpp without our sampler: the same noise, and the same
filters but for rounding."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from . import ggml
from .memory import matrix
from .row_results import LOG_ONE, MOST_TOP, RESULT, RowResults, Status
from .row_sampler import ALWAYS, UNCHECKED, Filters, RowRequest, RowSampler
from .row_steps import RowSteps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from .row_sampler import Place

    Ids = npt.NDArray[Any]
    Row = npt.NDArray[np.float32]
    Numbers = npt.NDArray[np.float64]

DRAW, XTC = 0, 1
"""Streams of noise."""

FARTHEST = 44
"""Binary logarithms below the best token beyond which none is drawn."""

ZIPF = 100
"""Tokens from which Mirostat's first version estimates how probabilities fall."""

LOG2_E = math.log2(math.e)

_logits_of = ggml.declare("llama_get_logits_ith", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)


class HostSampler(RowSampler):
    """One request's samplers, rules and penalties. They follow from the answer so far."""

    def __init__(self, filters: Filters, n_real: int) -> None:
        self._filters, self._n_real = filters, n_real
        self._answer: list[int] = []
        self._biases: list[tuple[Ids, Row]] = []
        self._bans: list[tuple[Ids, int]] = []
        self._words: list[list[int]] = []
        self._penalties: list[tuple[float, float, float, int | None, Ids]] = []
        self._idle: set[int] = set()
        """Penalties that do not apply to the next token."""
        self._mu = 2 * filters.mirostat_tau

    def bias(self, biases: Iterable[tuple[int, float]]) -> None:
        ids, values = zip(*biases, strict=True) if (biases := [*biases]) else ((), ())
        inside = np.array(ids, np.int32) < self._n_real
        self._biases.append((np.array(ids, np.int32)[inside], np.array(values, np.float32)[inside]))

    def allow(self, tokens: Iterable[int]) -> None:
        self._bans.append((np.setdiff1d(np.arange(self._n_real), self._real(tokens)), ALWAYS))

    def ban(self, tokens: Iterable[int], until: int = ALWAYS) -> None:
        self._bans.append((self._real(tokens), until))

    def bad_word(self, tokens: Sequence[int]) -> None:
        if len(self._real(tokens)) == len(tokens):
            self._words.append(list(tokens))

    def penalise(
        self, repetition: float, presence: float, frequency: float, last_n: int | None, prompt: Sequence[int]
    ) -> int:
        self._penalties.append((repetition, presence, frequency, last_n, self._real(prompt)))
        return len(self._penalties) - 1

    def set_active(self, penalties: int, active: bool) -> None:
        (self._idle.discard if active else self._idle.add)(penalties)

    def accept(self, token: int) -> None:
        self._answer.append(token)

    def take_back(self, token: int) -> None:
        self._answer.pop()

    def observe(self, surprise: int) -> None:
        mu = self._mu - self._filters.mirostat_eta * (surprise / 2**24 - self._filters.mirostat_tau)
        self._mu = min(max(mu, -100.0), 100.0)

    def close(self) -> None:
        pass

    def sample(self, request: RowRequest, logits: Row, result: Any) -> None:
        """Fill in the result, of `RESULT`, of a row [n_vocab]."""
        result["token"] = -1
        if request.n_top != UNCHECKED and not np.isfinite(logits).all():
            result["status"] = Status.NOT_FINITE
        elif request.n_top != UNCHECKED and not logits.any():
            result["status"] = Status.ZERO
        elif (token := request.scored if request.scored >= 0 else self._choose(request, logits, result)) < 0:
            result["status"] = Status.NONE_LEFT
        else:
            result["token"] = token
            if request.n_top >= 0:
                self._score(token, request.n_top, logits, result)

    def _score(self, token: int, n_top: int, logits: Row, result: Any) -> None:
        real, best, own = logits[: self._n_real], logits.max(), logits[token]
        result["logit"], result["best"] = own, best
        result["mass"] = np.exp(logits - best, dtype=np.float64).sum() * math.exp(LOG_ONE)
        result["rank"] = 1 + np.count_nonzero(real > own) + np.count_nonzero(real[:token] == own)
        top = np.sort(_best_of(real, min(n_top, MOST_TOP)))
        top = top[np.argsort(-real[top], kind="stable")]
        result["n_top"] = n = len(top)
        result["top"][:n], result["top_logits"][:n] = top, real[top]

    def _choose(self, request: RowRequest, logits: Row, result: Any) -> int:
        row, ops = self._ruled(request, logits), self._filters.ops
        token = int(row.argmax())
        if not row[token] > -np.inf:
            return -1
        if ops == ("best",) or row[token] == np.inf:
            return token
        ids = np.flatnonzero(row > -np.inf)
        ids, far = self._filtered(ids, row[ids], len(logits))
        drawn = int((_gumbel(self._seed(DRAW), ids) - far - (far > FARTHEST) * 1e9).argmax())
        if "mirostat" in ops or "mirostat_v2" in ops:
            result["surprise"] = int((far[drawn] + math.log2(np.exp2(-far).sum())) * 2**24)
        return int(ids[drawn])

    def _ruled(self, request: RowRequest, logits: Row) -> Row:
        """The row [n_real] after rules and penalties; what may not be chosen has -inf."""
        row, lowered = logits[: self._n_real].astype(np.float32), request.lowered
        for ids, values in self._biases:
            np.add.at(row, ids, values)
        if lowered is not None and lowered.first:
            row[lowered.ids] -= lowered.less
        for i, each in enumerate(self._penalties or [None]):
            if each is not None and i not in self._idle:
                self._penalised(row, *each)
            if i == 0 and lowered is not None and not lowered.first:
                row[lowered.ids] -= lowered.less
        for ids, until in self._bans:
            if len(self._answer) < until:
                row[ids] = -np.inf
        for *before, last in self._words:
            if self._answer[len(self._answer) - len(before) :] == before:
                row[last] = -np.inf
        if request.mask is not None:
            bits = np.unpackbits(request.mask.view(np.uint8), count=self._n_real, bitorder="little")
            row[bits == 0] = -np.inf
        return row

    def _penalised(
        self, row: Row, repetition: float, presence: float, frequency: float, last_n: int | None, prompt: Ids
    ) -> None:
        text = self._real(self._answer)
        if last_n is not None:
            text = np.concatenate([prompt, text])
            text = text if last_n < 0 else text[max(0, len(text) - last_n) :]
        ids, counts = np.unique(text, return_counts=True)
        seen = np.union1d(prompt, ids) if last_n is None else ids
        factor, logits = np.float32(repetition), row[seen]
        row[seen] = np.where(logits > 0, logits / factor, logits * factor)
        row[ids] -= np.float32(presence) + np.float32(frequency) * counts.astype(np.float32)

    def _filtered(self, ids: Ids, values: Row, n_vocab: int) -> tuple[Ids, Numbers]:
        """The tokens that the filters leave, in order, and how many bits each is below the best one."""
        f, scale = self._filters, LOG2_E
        keep: Ids
        for op in f.ops:
            if op == "top_k":
                keep = np.sort(_best_of(values, f.top_k))
                ids, values = ids[keep], values[keep]
                continue
            if op == "temperature":
                scale = LOG2_E / max(f.temperature, 1e-9)
                continue
            far = (float(values.max()) - values.astype(np.float64)) * scale
            masses = np.exp2(-far)
            total, keep = float(masses.sum()), masses >= 0
            if op == "top_n_sigma":
                below = np.floor(np.minimum(values.max() - values, 1024) * np.float64(4096))  # as ours rounds
                keep = below <= f.top_n_sigma * math.floor(below.std())
            elif op == "typ_p":
                order = np.argsort(np.abs(far - masses @ far / total), kind="stable")
                keep = _reached(order, masses, f.typical_p * total, f.min_keep)
            elif op == "top_p":
                # the others have less than the rest together
                some = np.flatnonzero(masses * len(ids) >= (0 if f.min_keep > 1 else (1 - f.top_p) * total))
                order = some[np.argsort(-values[some], kind="stable")]
                keep = _reached(order, masses, f.top_p * total, f.min_keep)
            elif op == "min_p":
                keep = masses >= f.min_p
                keep[_best_of(values, f.min_keep)] = True
            elif op == "xtc":
                above = np.flatnonzero(masses >= f.xtc_threshold * total)[::-1]
                enough = f.min_keep < 2 or len(ids) - len(above) + 1 >= f.min_keep
                [coin], _ = _random(self._seed(XTC), np.zeros(1, np.int32))
                if coin < f.xtc_probability * 2**32 and len(above) and enough:
                    keep[above] = False
                    keep[above[values[above].argmin()]] = True
            elif op == "temp_ext" and len(ids) > 1:
                share = min(1.0, (math.log2(total) + float(masses @ far) / total) / math.log2(len(ids)))
                coldest = max(0.0, f.temperature - f.dynatemp_range)
                span = f.temperature + f.dynatemp_range - coldest
                scale = LOG2_E / max(coldest + span * share**f.dynatemp_exponent, 1e-9)
            elif op == "mirostat":
                keep = np.sort(_best_of(values, self._mirostat(np.sort(far)[:ZIPF], n_vocab)))
            elif op == "mirostat_v2":
                keep = far <= max(0.0, self._mu - math.log2(total))
            ids, values = ids[keep], values[keep]
        return ids, (float(values.max()) - values.astype(np.float64)) * scale

    def _mirostat(self, far: Numbers, n_vocab: int) -> int:
        """How many tokens the first version keeps (Basu et al. 2021, equation 8)."""
        steps = np.log2(np.arange(2, len(far) + 1) / np.arange(1, len(far)))
        s = float(steps @ np.diff(far)) / (float(steps @ steps) or 1.0)
        more = s - 1 or 2**-16
        k = (self._mu + math.log2(more / (1 - n_vocab**-more))) / max(s, 2**-16)
        return max(1, int(2 ** min(k, 30.0)))

    def _seed(self, stream: int) -> int:
        return _mix64(_mix64(self._filters.seed % 2**64) ^ _mix64(4 * len(self._answer) + stream))


class HostRowSteps(RowSteps):
    """Samples rows that were copied to the host."""

    outlive_batches = False

    def switch(self, place: Place | None) -> bool:
        return place is not None

    def begin(self, requests: Sequence[RowRequest], indices: Sequence[int], *, now: bool) -> None:
        self._asked = requests, indices

    def results(self) -> RowResults:
        requests, indices = self._asked
        rows: list[Row] = [matrix(_logits_of(self._context, i), 1, self._n_vocab)[0] for i in indices]
        return sample_rows(requests, rows)


def sample_rows(requests: Sequence[RowRequest], rows: Sequence[Row]) -> RowResults:
    """Choose a token from each row [n_vocab]."""
    results, drafted = np.zeros(len(requests), RESULT), 0
    for request, row, result in zip(requests, rows, results, strict=True):
        if (sampler := request.sampler) is None:
            continue
        assert isinstance(sampler, HostSampler)
        with np.errstate(over="ignore", invalid="ignore"):
            sampler.sample(request, row, result)
        if request.draft >= 0:
            sampler.accept(request.draft)
            drafted += 1
            continue
        for _ in range(drafted):
            sampler.take_back(-1)
        drafted = 0
    return RowResults(results, lambda i: rows[i])


def _reached(order: Ids, masses: Numbers, need: float, least: int) -> Ids:
    """The first tokens of an order that have masses of `need` together, and at least so many."""
    n = int(np.searchsorted(np.cumsum(masses[order]), need)) + 1
    return np.sort(order[: max(n, least)])


def _best_of(logits: Row, k: int) -> Ids:
    """Places of the `k` highest logits, in any order; of equal ones the lowest places count."""
    places = np.arange(len(logits))
    if k >= len(logits) or not k:
        return places[:k]
    if (n_blocks := len(logits) // 256) > 4 * k:  # few logits exceed the k-th highest of the blocks' maxima
        maxima = logits[: n_blocks * 256].reshape(n_blocks, 256).max(axis=1)
        places = np.flatnonzero(logits >= np.partition(maxima, -k)[-k])
    least = np.partition(logits[places], -k)[-k]
    above = places[logits[places] > least]
    return np.concatenate([above, places[logits[places] == least][: k - len(above)]])


# --- noise, as in native/src/llama-row-sampler.h -----------------------------------------------------------


def _gumbel(seed: int, ids: Ids) -> Numbers:
    """Standard Gumbel noise of tokens, in binary logarithms."""
    high, low = _random(seed, ids)
    share = np.minimum((high * 2.0**32 + low + 0.5) / 2.0**64, 1 - 2.0**-53)
    return np.asarray(-np.log2(-np.log1p(-share)))


def _random(seed: int, ids: Ids) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The high and the low half of each token's random number."""
    tokens, above = ids.astype(np.uint32), np.uint32(seed >> 32)
    high = _mix32(_mix32(tokens + np.uint32(seed % 2**32)) ^ above)
    return high, _mix32(high + above + np.uint32(0x9E3779B9) * tokens)


def _mix32(x: Any) -> Any:  # Wellons' lowbias32
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _mix64(x: int) -> int:  # splitmix64
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ x >> shift) * factor) % 2**64
    return x ^ x >> 31
