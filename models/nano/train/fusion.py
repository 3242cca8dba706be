"""Elementwise work that a compiler may fuse: off by default, on for training on a GPU."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
R = TypeVar("R")


class Fusion:
    """The switch, for all functions at once."""

    on = False

    @classmethod
    @contextlib.contextmanager
    def paused(cls) -> Iterator[None]:
        """Plain functions for a while: what runs seldom is not worth another compilation."""
        before, cls.on = cls.on, False
        try:
            yield
        finally:
            cls.on = before


def fusible(function: Callable[P, R]) -> Callable[P, R]:
    """The function, compiled once Fusion.on is set, for all sizes of batch and time (dimensions 0 and 1)."""
    compiled = torch.compile(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not Fusion.on:
            return function(*args, **kwargs)
        for value in args:
            if isinstance(value, torch.Tensor) and value.ndim >= 3:
                torch._dynamo.maybe_mark_dynamic(value, (0, 1))
        out: R = compiled(*args, **kwargs)
        return out

    return call
