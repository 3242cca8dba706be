"""llama.cpp's CPU samplers."""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np

from . import ggml

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from .model import Model

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""`struct llama_token_data`."""

_FEW = 1024
"""Below this number of candidates, sampling takes microseconds and keeps the GIL."""

_apply_quickly = ggml.quick("llama_sampler_apply", None, ctypes.c_void_p, ctypes.c_void_p)
_accept = ggml.quick("llama_sampler_accept", None, ctypes.c_void_p, ctypes.c_int32)

_LOGARITHMS = ("typical", "mirostat")
"""Samplers that take the logarithm of every candidate's probability, and fail if one is 0."""

_RANGE = 80.0
"""Within this distance of the highest logit a probability is above 0 in F32; candidates below it do not
affect a draw."""


class _Surprise:
    """Which candidates the second version of Mirostat considers: those whose surprise, in bits, is at most a
    bound that follows the surprises of the tokens drawn (`llama_sampler_mirostat_v2_apply`). Without the
    others llama.cpp sorts a hundred tokens instead of the vocabulary, which takes 18 ms of 248,320."""

    def __init__(self, temperature: float, tau: float, eta: float) -> None:
        self._temperature, self._tau, self._eta, self._most = temperature, tau, eta, 2 * tau

    def of(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        masses = np.exp((logits - logits.max()) / np.float32(self._temperature))
        least = masses.sum(dtype=np.float64) * 2.0**-self._most
        return np.asarray(masses >= min(least, 1.0))  # the best one has 1

    def drawn(self, p: float) -> None:
        """Take the probability of the token among the candidates."""
        self._most -= self._eta * (-math.log2(p) - self._tau)


class SamplerChain:
    """Samplers of llama.cpp in order; the last draws."""

    def __init__(self, samplers: Iterable[tuple[Any, ...]]) -> None:
        """Each item is the name of a `llama_sampler_init_...` and its arguments."""
        params = C.llama_sampler_chain_default_params()
        params.no_perf = True
        self._handle = C.llama_sampler_chain_init(params)
        self._range: float | None = None
        """Distance below the highest logit at which candidates are dropped, for samplers that fail on
        them."""
        self._surprise: _Surprise | None = None
        scale = 1.0
        for name, *arguments in samplers:
            C.llama_sampler_chain_add(self._handle, getattr(C, f"llama_sampler_init_{name}")(*arguments))
            if name == "temp_ext":
                temperature, delta, _ = arguments
                scale = math.inf if delta else temperature
            elif name in _LOGARITHMS:
                self._range = _RANGE * scale
            elif name == "mirostat_v2" and 0 < scale < math.inf:
                self._surprise = _Surprise(scale, *arguments[1:])
        self._address = ctypes.cast(self._handle, ctypes.c_void_p).value
        self._array = C.llama_token_data_array()
        self._array_address = ctypes.addressof(self._array)
        self._data = np.zeros(0, _TOKEN_DATA)
        self._begin: Any = None
        self._ids, self._logits = self._columns(0)

    def draw(self, ids: npt.NDArray[np.integer], logits: npt.NDArray[np.float32]) -> int:
        """Draws one of `ids` by their logits, in any order. Neither array is changed."""
        if self._range is not None:
            worth = logits > logits.max() - self._range
            ids, logits = ids[worth], logits[worth]
        if self._surprise is not None:
            likely = self._surprise.of(logits)
            ids, logits = ids[likely], logits[likely]
        n, array = len(ids), self._array
        if n != len(self._ids):
            self._ids, self._logits = self._columns(n)
        self._ids[...], self._logits[...] = ids, logits
        array.data, array.size, array.selected, array.sorted = self._begin, n, -1, False
        if n <= _FEW:
            _apply_quickly(self._address, self._array_address)
        else:
            C.llama_sampler_apply(self._handle, ctypes.byref(array))
        chosen = array.data[array.selected]  # XTC moves the array's start
        if self._surprise is not None:
            self._surprise.drawn(chosen.p)
        return int(chosen.id)

    def _columns(self, n: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Buffers for the ids and logits of `n` candidates, which llama.cpp reads from their start."""
        if n > len(self._data):
            self._data = np.zeros(n, _TOKEN_DATA)
            self._begin = self._data.ctypes.data_as(C.llama_token_data_p)
        return self._data["id"][:n], self._data["logit"][:n]

    def close(self) -> None:
        """Free the chain. Idempotent."""
        if self._handle:
            C.llama_sampler_free(self._handle)
            self._handle = None


class DrySampler:
    """llama.cpp's DRY: lowers tokens that would extend a repetition, the more the longer it is.

    It remembers the last `last_n` tokens.
    """

    def __init__(self, handle: Any) -> None:
        """Use `made` or `copy`, which have the handles."""
        self._handle = handle
        self._address = ctypes.cast(handle, ctypes.c_void_p).value
        self._free = weakref.finalize(self, C.llama_sampler_free, handle)
        self._free.atexit = False  # llama.cpp may be unloaded by then

    @classmethod
    def made(
        cls,
        model: Model,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Sequence[str],
    ) -> DrySampler:
        """Creates a sampler. Each of the `breakers`, which end a repetition, is searched in every token: 25
        ms for 248,320 of them, without the GIL."""
        texts = (ctypes.c_char_p * len(breakers))(*(text.encode("utf-8", "replace") for text in breakers))
        sizes = allowed_length, last_n
        return cls(C.llama_sampler_init_dry(model._vocab, multiplier, base, *sizes, texts, len(texts)))

    def copy(self) -> DrySampler:
        """A copy with the same history; in less than a millisecond."""
        return DrySampler(C.llama_sampler_clone(self._handle))

    def accept(self, token: int) -> None:
        """Appends `token` to the history."""
        _accept(self._address, token)

    def applied(
        self, ids: npt.NDArray[np.integer], logits: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """The logits of `ids` after the penalty."""
        data = np.empty(len(ids), _TOKEN_DATA)
        data["id"], data["logit"] = ids, logits
        array = C.llama_token_data_array(
            data=data.ctypes.data_as(C.llama_token_data_p), size=len(ids), selected=-1, sorted=False
        )
        C.llama_sampler_apply(self._handle, ctypes.byref(array))
        return data["logit"].copy()

    def close(self) -> None:
        """Free llama.cpp's part. Idempotent."""
        self._free()
