"""Operations that numpy and torch spell differently; the rest of this package works with both."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np

from qwen_serve.llamacpp.probe import Floats

Array: TypeAlias = Any
"""A numpy array or a torch tensor; their types are unrelated."""

Bring: TypeAlias = "Callable[[Floats], Array]"
"""Copies an array to the device that computes the rounding."""


def backend(*, gpu: bool) -> Bring:
    """A GPU if `gpu` and torch finds one, else numpy."""
    if gpu and find_spec("torch") is not None:
        import torch  # an optional extra

        if torch.cuda.is_available():
            return lambda array: torch.tensor(array, device="cuda")
    return np.array


def release() -> None:
    """Frees the GPU memory that torch keeps for later arrays, so that llama.cpp can have it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.cuda.empty_cache()


def namespace(array: Array) -> Any:
    """The module that an array is of."""
    if isinstance(array, np.ndarray):
        return np
    return sys.modules["torch"]


def half(array: Array) -> Array:
    """The array rounded to F16, in its own type."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float16).astype(array.dtype)
    return array.half().to(array.dtype)


def on_host(array: Array, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    """The array as a contiguous numpy array. An array on a GPU is converted there, before it is copied."""
    if isinstance(array, np.ndarray):
        return array.astype(dtype, order="C")
    return np.asarray(array.to(getattr(namespace(array), dtype.__name__)).contiguous().cpu().numpy())


def transposed(array: Array) -> Array:
    """A transposed copy, contiguous."""
    return np.ascontiguousarray(array.T) if isinstance(array, np.ndarray) else array.T.contiguous()


def like(array: Array, other: Array) -> Array:
    """The array in `other`'s module, device and type. It may be numpy's or of the same module."""
    if isinstance(other, np.ndarray):
        return array.astype(other.dtype)
    return namespace(other).as_tensor(array, dtype=other.dtype, device=other.device)


def indices(array: np.ndarray[Any, Any], other: Array) -> Array:
    """Positions in a form that can index `other`."""
    return array if isinstance(other, np.ndarray) else namespace(other).as_tensor(array, device=other.device)


def double(array: Array) -> Array:
    """The array in 64 bits, for inverting a matrix."""
    return array.astype(np.float64) if isinstance(array, np.ndarray) else array.double()
