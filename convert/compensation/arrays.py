"""Operations that numpy and torch spell differently; the rest of this package works with both."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""A numpy array or a torch tensor; their types are unrelated."""


def namespace(array: Array) -> Any:
    """The module that an array is of."""
    if isinstance(array, np.ndarray):
        return np
    import torch  # an optional extra, imported only for its tensors

    return torch


def half(array: Array) -> Array:
    """The array rounded to F16, in its own type."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float16).astype(array.dtype)
    return array.half().to(array.dtype)


def on_host(array: Array, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    """The array as a contiguous numpy array; one of a GPU is converted there, before it is copied."""
    if isinstance(array, np.ndarray):
        return array.astype(dtype, order="C")
    return np.asarray(array.to(getattr(namespace(array), dtype.__name__)).contiguous().cpu().numpy())


def transposed(array: Array) -> Array:
    """A transposed copy, contiguous."""
    return np.ascontiguousarray(array.T) if isinstance(array, np.ndarray) else array.T.contiguous()


def like(array: Array, other: Array) -> Array:
    """A numpy array, or one of the same module, in `other`'s module, device and type."""
    if isinstance(other, np.ndarray):
        return array.astype(other.dtype)
    return namespace(other).as_tensor(array, dtype=other.dtype, device=other.device)


def indices(array: np.ndarray[Any, Any], other: Array) -> Array:
    """Positions in a form that can index `other`."""
    return array if isinstance(other, np.ndarray) else namespace(other).as_tensor(array, device=other.device)


def double(array: Array) -> Array:
    """The array in 64 bits, for inverting a matrix."""
    return array.astype(np.float64) if isinstance(array, np.ndarray) else array.double()
