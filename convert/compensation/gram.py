"""Gram matrices of matrices' inputs: sums of products of any two input columns over calibration rows.

The diagonal is what an importance matrix holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.convert.compensation.arrays import namespace
from qwen_serve.convert.errors import ConvertError

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from qwen_serve.convert.compensation.arrays import Array
    from qwen_serve.llamacpp.probe import Floats, Routing


class EnoughError(Exception):
    """Stops a graph when the rest of it is not needed."""


class Order:
    """An observer that records the order in which weights are read, and which of them read one tensor."""

    def __init__(self) -> None:
        self.readings: list[list[str]] = []
        """Groups of weights with the same input, in the graph's order."""
        self._seen: set[str] = set()
        self._rows: Floats | None = None

    def add(self, name: str, rows: Floats, routing: Routing | None = None) -> None:
        if name in self._seen:
            return
        self._seen.add(name)
        if rows is not self._rows:
            self.readings.append([])
            self._rows = rows
        self.readings[-1].append(name)


class Grams:
    """An observer that sums the Gram matrices of one or more readings.

    Args:
        wanted: the readings' first weights, which stand for all of them.
        end: the weight after which nothing more is needed.
        bring: moves rows to the device that computes the products.
    """

    def __init__(self, wanted: Container[str], end: str | None, bring: Callable[[Floats], Array]) -> None:
        self._wanted, self._end, self._bring = wanted, end, bring
        self._sums: dict[str, Array] = {}

    def observes(self, name: str) -> bool:
        return name in self._wanted or name == self._end

    def add(self, name: str, rows: Floats, routing: Routing | None = None) -> None:
        """`rows` [n, width]: inputs of weight `name`; with `routing`, of the matrices in it."""
        if name == self._end:
            raise EnoughError
        matrices = 1 if routing is None else routing.experts
        if name not in self._sums:
            width = rows.shape[1]
            self._sums[name] = self._bring(np.zeros((matrices, width, width), np.float32))
        sums = self._sums[name]
        if routing is None:
            here = self._bring(rows)
            sums[0] += here.T @ here
            return
        tokens, used = routing.ids.shape
        row = np.arange(tokens)[:, None] * routing.slots + np.arange(used) % routing.slots
        for expert in np.unique(routing.ids):
            here = self._bring(rows[row[routing.ids == expert]])
            sums[int(expert)] += here.T @ here

    def take(self, name: str) -> Array:
        """[matrices, width, width], which are then discarded.

        Raises:
            ConvertError: a sum is not finite.
        """
        sums = self._sums.pop(name)
        if not bool(namespace(sums).isfinite(sums).all()):
            raise ConvertError(f"the inputs of {name} are not finite; is the checkpoint intact?")
        return sums
