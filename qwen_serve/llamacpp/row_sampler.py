"""Our sampler (native/src/llama-row-sampler.cpp): chooses tokens from many rows at once, on several threads.

It draws with Gumbel noise that depends only on the seed, the number of tokens before and the token, and adds
up masses as integers. So a draw is the same for a whole row and for its best tokens, on any number of
threads.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np

from . import ggml

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

HAS_ROW_SAMPLER = hasattr(C._lib, "llama_row_sample")
"""Whether this build has the sampler. Stock llama.cpp has not."""

N_THREADS = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""Threads that choose from whole rows."""

MOST_TOP = 20
"""Most likeliest tokens with log-probabilities (LLAMA_ROW_MAX_TOP)."""

OPS = {
    "top_n_sigma": 1,
    "top_k": 2,
    "temperature": 3,
    "typ_p": 4,
    "top_p": 5,
    "min_p": 6,
    "xtc": 7,
    "best": 8,
}
"""Samplers by the names of llama.cpp, in any order, each at most once; `best` takes the best token, without a
draw."""

FAR = 63
"""Binary logarithms below the best token at which no token has a mass."""

ALWAYS = 2**31 - 1


class Status(IntEnum):
    """What came of a row."""

    OK = 0
    NOT_FINITE = 1
    ZERO = 2
    NONE_LEFT = 3
    """The rules leave no token."""
    NONE_FITS = 4
    """The mask leaves no token."""
    UNSETTLED = 5
    """The candidates do not determine the choice: the whole row does."""


class _Params(ctypes.Structure):
    """`struct llama_row_params`."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("top_k", ctypes.c_int32),
        ("top_p", ctypes.c_uint32),
        ("typical", ctypes.c_uint32),
        ("min_p", ctypes.c_uint32),
        ("xtc", ctypes.c_uint64),
        ("xtc_least", ctypes.c_uint32),
        ("n_sigma", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("ops", ctypes.c_uint8 * 8),
    ]


class _Row(ctypes.Structure):
    """`struct llama_row`."""

    _fields_ = [
        ("sampler", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("n", ctypes.c_int32),
        ("n_mask", ctypes.c_int32),
        ("number", ctypes.c_double),
        ("lowest", ctypes.c_float),
        ("n_top", ctypes.c_int32),
        ("scored", ctypes.c_int32),
        ("status", ctypes.c_int32),
        ("token", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("logprob", ctypes.c_float),
        ("top", ctypes.c_int32 * MOST_TOP),
        ("top_logprobs", ctypes.c_float * MOST_TOP),
    ]


if HAS_ROW_SAMPLER:
    _P, _I32, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
    _init = ggml.quick("llama_row_sampler_init", _P, ctypes.POINTER(_Params), _I32)
    _free = ggml.quick("llama_row_sampler_free", None, _P)
    _bias = ggml.quick("llama_row_sampler_bias", None, _P, _P, _P, _I32)
    _allow = ggml.quick("llama_row_sampler_allow", None, _P, _P, _I32)
    _ban = ggml.quick("llama_row_sampler_ban", None, _P, _P, _I32, _I32)
    _bad_word = ggml.quick("llama_row_sampler_bad_word", None, _P, _P, _I32)
    _penalties = ggml.quick("llama_row_sampler_penalties", _I32, _P, _F32, _F32, _F32, _I32, _P, _I32)
    _set_active = ggml.quick("llama_row_sampler_set_active", None, _P, _I32, ctypes.c_bool)
    _accept = ggml.quick("llama_row_sampler_accept", None, _P, _I32)
    _sample = ggml.declare("llama_row_sample", None, ctypes.POINTER(_Row), _I32, _I32)


@dataclass(frozen=True, slots=True)
class Filters:
    """Samplers in their order, names of `OPS`, and their parameters."""

    ops: tuple[str, ...]
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0

    def _struct(self) -> _Params:
        params = _Params(
            seed=self.seed % 2**64,
            top_k=min(self.top_k, 2**31 - 1),
            top_p=_part(self.top_p),
            typical=_part(self.typical_p),
            min_p=int(min(FAR, -math.log2(self.min_p)) * 2**24) if self.min_p else FAR << 24,
            xtc=int(self.xtc_probability * 2**32),
            xtc_least=_part(self.xtc_threshold),
            n_sigma=self.top_n_sigma,
            # 0 takes the best; a smaller temperature would give the same
            scale=math.log2(math.e) / max(self.temperature, 1e-9),
        )
        params.ops[: len(self.ops)] = [OPS[name] for name in self.ops]
        return params


def _part(share: float) -> int:
    return min(int(share * 2**32), 2**32 - 1)


class RowSampler:
    """One request's samplers, rules and penalties. It follows one answer: `accept` takes its tokens in
    order."""

    def __init__(self, filters: Filters, n_real: int) -> None:
        """Only the first `n_real` tokens are chosen."""
        self._handle = _init(ctypes.byref(filters._struct()), n_real)
        self._n_real = n_real
        self._free = weakref.finalize(self, _free, self._handle)
        self._free.atexit = False  # llama.cpp may be unloaded by then

    def bias(self, biases: Iterable[tuple[int, float]]) -> None:
        """Add to the logits of tokens. Rules come in this order: bias, then bans; penalties are next."""
        inside = [(token, bias) for token, bias in biases if token < self._n_real]
        ids, values = _ids(token for token, _ in inside), np.array([bias for _, bias in inside], np.float32)
        _bias(self._handle, ids.ctypes.data, values.ctypes.data, len(ids))

    def allow(self, tokens: Iterable[int]) -> None:
        """Choose no other tokens."""
        ids = self._real(tokens)
        _allow(self._handle, ids.ctypes.data, len(ids))

    def ban(self, tokens: Iterable[int], until: int = ALWAYS) -> None:
        """Do not choose these before the answer has `until` tokens."""
        ids = self._real(tokens)
        _ban(self._handle, ids.ctypes.data, len(ids), min(until, ALWAYS))

    def bad_word(self, tokens: Sequence[int]) -> None:
        """Do not choose the last of these after all the others."""
        ids = self._real(tokens)
        if len(ids) == len(tokens):
            _bad_word(self._handle, ids.ctypes.data, len(ids))

    def penalise(
        self,
        repetition: float,
        presence: float,
        frequency: float,
        last_n: int | None,
        prompt: Sequence[int],
    ) -> int:
        """Penalise tokens seen; returns the number of these penalties. `last_n` as `repeat_last_n` of
        `SamplingParams`."""
        ids = np.asarray(prompt, np.int32)
        window = -2 if last_n is None else last_n
        values = repetition, presence, frequency, window
        return int(_penalties(self._handle, *values, ids.ctypes.data, len(ids)))

    def set_active(self, penalties: int, active: bool) -> None:
        """Whether these penalties apply to the next token; they count tokens either way."""
        _set_active(self._handle, penalties, active)

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        _accept(self._handle, token)

    def close(self) -> None:
        """Free its memory. Idempotent."""
        self._free()

    def _real(self, tokens: Iterable[int]) -> npt.NDArray[np.int32]:
        return _ids(token for token in tokens if 0 <= token < self._n_real)


def _ids(tokens: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(tokens, np.int32)


@dataclass(slots=True)
class RowRequest:
    """A row to choose from, which does not change. The sampler does not, either, until it accepts a token."""

    sampler: RowSampler
    logits: npt.NDArray[np.float32]
    """[n_vocab], padding included, or of the candidates [n]."""
    ids: npt.NDArray[np.int32] | None = None
    """The candidates' tokens; None for a whole row."""
    lowest: float = -math.inf
    """The highest logit that a token which is not a candidate may have."""
    number: float = -1.0
    """Draws by the sum of masses, best first, from 0 to 1; negative: by noise."""
    mask: npt.NDArray[np.bool_] | None = None
    """Whether each token may be chosen; it may be longer than the row."""
    n_top: int = -1
    """For a whole row, the likeliest tokens to return with log-probabilities; -1: no log-probabilities."""
    scored: int = -1
    """A token whose log-probability is wanted, instead of a choice."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """The log-probabilities are those of the row as the model computed it, padding included."""

    status: Status
    token: int
    logprob: float
    rank: int
    """1 for the likeliest token; of equally likely ones the lowest id comes first."""
    best: npt.NDArray[np.int32]
    """The likeliest tokens, best first; of equally likely ones the lowest id."""
    best_logprobs: npt.NDArray[np.float32]


def sample_rows(requests: Sequence[RowRequest], n_threads: int = N_THREADS) -> list[RowResult]:
    """Choose a token from each row. Releases the GIL."""
    rows = (_Row * len(requests))()
    kept: list[object] = []
    for row, request in zip(rows, requests, strict=True):
        logits = np.ascontiguousarray(request.logits, np.float32)
        row.sampler, row.logits, row.n = request.sampler._handle, logits.ctypes.data, len(logits)
        row.lowest, row.n_top, row.scored = request.lowest, request.n_top, request.scored
        row.number = request.number
        kept.append(logits)
        if request.ids is not None:
            ids = np.ascontiguousarray(request.ids, np.int32)
            row.ids = ids.ctypes.data
            kept.append(ids)
        if request.mask is not None:
            bits = np.packbits(request.mask, bitorder="little")
            bits = np.pad(bits, (0, -len(bits) % 4))
            row.mask, row.n_mask = bits.ctypes.data, len(bits) // 4
            kept.append(bits)
    whole = sum(request.ids is None for request in requests)
    _sample(rows, len(requests), min(n_threads, whole))
    return [_result(row) for row in rows]


def _result(row: _Row) -> RowResult:
    n = max(0, row.n_top)
    best, logprobs = np.array(row.top[:n], np.int32), np.array(row.top_logprobs[:n], np.float32)
    n = int(np.count_nonzero(best >= 0))  # a vocabulary may be smaller
    return RowResult(Status(row.status), row.token, row.logprob, row.rank, best[:n], logprobs[:n])
