"""llama.cpp's DRY."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import numpy.typing as npt

from . import ggml
from .model import Model

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""`struct llama_token_data`."""

_accept = ggml.quick("llama_sampler_accept", None, ctypes.c_void_p, ctypes.c_int32)


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

    def less(self, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
        """What it subtracts from the logits of `ids`."""
        data = np.zeros(len(ids), _TOKEN_DATA)
        data["id"] = ids
        array = C.llama_token_data_array(
            data=data.ctypes.data_as(C.llama_token_data_p), size=len(ids), selected=-1, sorted=False
        )
        C.llama_sampler_apply(self._handle, ctypes.byref(array))
        return np.asarray(-data["logit"])

    def close(self) -> None:
        """Free llama.cpp's part. Idempotent."""
        self._free()
