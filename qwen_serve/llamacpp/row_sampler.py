"""Our sampler: chooses the tokens of a step from its rows, on the device where they are, or on the host's
threads (native/ggml/src/ggml-cuda/row-sampler.cu, native/src/llama-row-sampler.cpp).

It draws with Gumbel noise that depends only on the seed, the number of tokens before and the token, and adds
up masses as integers. So a draw is the same for a whole row and for its best tokens, on any number of
threads.
"""

import ctypes
import math
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from . import ggml
from .patches import ROW_SAMPLER, brings
from .row_results import RESULT, RowResults

HAS_ROW_SAMPLER = brings(ROW_SAMPLER, "llama_row_sampler_observe")
"""Whether this build has the sampler. For stock llama.cpp there is host_sampler.py."""

N_THREADS = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""Threads that choose from whole rows."""

OPS = {
    "top_n_sigma": 1,
    "top_k": 2,
    "temperature": 3,
    "typ_p": 4,
    "top_p": 5,
    "min_p": 6,
    "xtc": 7,
    "best": 8,
    "temp_ext": 9,
    "mirostat": 10,
    "mirostat_v2": 11,
}
"""Samplers by the names of llama.cpp, in any order, each at most once; `best` takes the best token, without a
draw. `temp_ext` is dynamic temperature. Nothing comes after `best` and `mirostat`."""

FAR = 63
"""Binary logarithms below the best token at which no token has a mass."""

ALWAYS = 2**31 - 1

UNKNOWN = ALWAYS
"""As `draft` of a request: some token comes before the next row. It is not counted."""

UNCHECKED = -2
"""`n_top` of a row whose logits need not be finite."""

NO_LOGITS = (
    "the model computed no usable logits ({}): its weights are damaged, or hold values that are not finite"
)
"""All logits may be 0, because llama.cpp turns NaN into zeros when it quantizes a product's input."""


class Place(IntEnum):
    """Where rows are sampled."""

    HOST = 1
    DEVICE = 2
    """If the device has a sampler; otherwise the host."""


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
        ("min_keep", ctypes.c_int32),
        ("temp_low", ctypes.c_float),
        ("temp_range", ctypes.c_float),
        ("exponent", ctypes.c_uint32),
        ("mu", ctypes.c_int32),
        ("ops", ctypes.c_uint8 * 8),
    ]


class _Ask(ctypes.Structure):
    """`struct llama_row_ask`."""

    _fields_ = [
        ("sampler", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("n_mask", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("n_top", ctypes.c_int32),
        ("scored", ctypes.c_int32),
        ("draft", ctypes.c_int32),
        ("ids", ctypes.c_void_p),
        ("less", ctypes.c_void_p),
        ("n_less", ctypes.c_int32),
        ("less_first", ctypes.c_bool),
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
    _mirostat = ggml.quick("llama_row_sampler_mirostat", None, _P, _F32, _F32)
    _observe = ggml.quick("llama_row_sampler_observe", None, _P, _I32)
    _accept = ggml.quick("llama_row_sampler_accept", None, _P, _I32)
    _take_back = ggml.quick("llama_row_sampler_take_back", None, _P, _I32)
    _sample = ggml.declare("llama_row_sample", None, _P, _P, _P, _I32, _I32, _I32)


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
    min_keep: int = 0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat_tau: float = 0.0
    mirostat_eta: float = 0.0

    def _struct(self) -> _Params:
        coldest = max(0.0, self.temperature - self.dynatemp_range)
        made = _Params(
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
            min_keep=min(self.min_keep, ALWAYS),
            temp_low=coldest,
            temp_range=self.temperature + self.dynatemp_range - coldest,
            exponent=int(min(self.dynatemp_exponent, 2**15) * 2**16),
        )
        made.ops[: len(self.ops)] = [OPS[name] for name in self.ops]
        return made


def _part(share: float) -> int:
    return min(int(share * 2**32), 2**32 - 1)


class RowSampler:
    """One request's samplers, rules and penalties. It follows one answer: `accept` takes its tokens in
    order. `host_sampler.make_sampler` makes that of this build."""

    def __init__(self, filters: Filters, n_real: int) -> None:
        """Only the first `n_real` tokens are chosen."""
        self._handle = _init(ctypes.byref(filters._struct()), n_real)
        self._n_real = n_real
        self._free = weakref.finalize(self, _free, self._handle)
        self._free.atexit = False  # llama.cpp may be unloaded by then
        _mirostat(self._handle, filters.mirostat_tau, filters.mirostat_eta)

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

    def observe(self, surprise: int) -> None:
        """Take the surprise of a token that Mirostat chose."""
        _observe(self._handle, surprise)

    def take_back(self, token: int) -> None:
        """Undo the last `accept`, of this token."""
        _take_back(self._handle, token)

    def close(self) -> None:
        """Free its memory. Idempotent."""
        self._free()

    def _real(self, tokens: Iterable[int]) -> npt.NDArray[np.int32]:
        ids = np.fromiter(tokens, np.int64)
        return ids[(ids >= 0) & (ids < self._n_real)].astype(np.int32)


def _ids(tokens: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(tokens, np.int32)


Bits = npt.NDArray[np.uint32]
"""A bit for each token of the vocabulary, the lowest one first."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """What is subtracted in one row, beside the sampler's penalties: before them, or after them."""

    ids: npt.NDArray[np.int32]
    """Each once, below `n_real`."""
    less: npt.NDArray[np.float32]
    first: bool


@dataclass(slots=True)
class RowRequest:
    """What is wanted of a row. The sampler does not change until it accepts a token."""

    sampler: RowSampler | None
    """None: the whole row is read on the host."""
    mask: Bits | None = None
    """Which tokens may be chosen; those behind its end may not."""
    n_top: int = -1
    """The likeliest tokens to return with log-probabilities; -1: no log-probabilities."""
    scored: int = -1
    """A token to take instead of a choice."""
    draft: int = -1
    """The next request is for the row behind this token, with the same sampler; -1: there is none."""
    lowered: Lowered | None = None


def asks(requests: Sequence[RowRequest], indices: Sequence[int], kept: list[Bits]) -> Any:
    made = (_Ask * len(requests))()
    for ask, request, index in zip(made, requests, indices, strict=True):
        ask.sampler = None if request.sampler is None else request.sampler._handle
        ask.index, ask.n_top, ask.scored, ask.draft = index, request.n_top, request.scored, request.draft
        if request.mask is not None:
            ask.mask, ask.n_mask = request.mask.ctypes.data, len(request.mask)
            kept.append(request.mask)
        if (lowered := request.lowered) is not None:
            ask.ids, ask.less = lowered.ids.ctypes.data, lowered.less.ctypes.data
            ask.n_less, ask.less_first = len(lowered.ids), lowered.first
    return made


def sample_rows(
    requests: Sequence[RowRequest],
    rows: Sequence[npt.NDArray[np.float32]],
    n_threads: int = N_THREADS,
) -> RowResults:
    """Choose a token from each row [n_vocab], on the host. Releases the GIL."""
    kept: list[Bits] = []
    made = asks(requests, range(len(requests)), kept)
    arrays = [np.ascontiguousarray(row, np.float32) for row in rows]
    addresses = np.array([array.ctypes.data for array in arrays], np.uintp)
    results = np.zeros(len(requests), RESULT)
    n_vocab = len(arrays[0]) if arrays else 0
    _sample(made, addresses.ctypes.data, results.ctypes.data, len(requests), n_vocab, n_threads)
    return RowResults(results, lambda i: rows[i])
