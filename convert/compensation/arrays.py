"""numpy or torch: what the two spell differently; everything else here is spelled alike in both."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen_serve.llamacpp.probe import Floats

Array: TypeAlias = Any
"""An array of numpy or a tensor of torch, whose types know nothing of each other."""


def namespace(array: Array) -> Any:
    """The module that an array is of."""
    if isinstance(array, np.ndarray):
        return np
    import torch  # an optional extra: only who brings its tensors needs it

    return torch


def backend(*, card: bool) -> Callable[[Floats], Array]:
    """What puts an array where rounding is computed: on a card, where there are one and torch, if `card`."""
    if card and find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return lambda array: torch.tensor(array, device="cuda")
    return np.array


def half(array: Array) -> Array:
    """Rounded to what F16 can hold, in the array's own type."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float16).astype(array.dtype)
    return array.half().to(array.dtype)


def on_host(array: Array, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    """As an array of numpy."""
    return np.asarray(array if isinstance(array, np.ndarray) else array.cpu().numpy()).astype(dtype)


def like(array: Array, other: Array) -> Array:
    """An array of numpy, or of the same module, as `other` is: its module, its device, its type."""
    if isinstance(other, np.ndarray):
        return array.astype(other.dtype)
    return namespace(other).as_tensor(array, dtype=other.dtype, device=other.device)


def indices(array: np.ndarray[Any, Any], other: Array) -> Array:
    """Positions, to index `other` with."""
    return array if isinstance(other, np.ndarray) else namespace(other).as_tensor(array, device=other.device)


def double(array: Array) -> Array:
    """In 64 bits, to invert a matrix in."""
    return array.astype(np.float64) if isinstance(array, np.ndarray) else array.double()
