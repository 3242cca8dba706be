"""Gram matrices of matrices' inputs: sums of products of any two input columns over calibration rows.

The diagonal is what an importance matrix holds.
"""

from collections.abc import Container

import numpy as np

from qwen_serve.convert.compensation.arrays import Array, Bring, namespace
from qwen_serve.convert.compensation.rounding import Inputs
from qwen_serve.convert.errors import ConvertError
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
    """

    def __init__(self, wanted: Container[str], end: str | None, bring: Bring) -> None:
        self._wanted, self._end, self._bring = wanted, end, bring
        self._sums: dict[tuple[str, int], Array] = {}
        self._whole: dict[str, Floats] = {}
        self._moved: dict[str, Array] = {}

    def observes(self, name: str) -> bool:
        return name in self._wanted or name == self._end

    def keep(self, name: str, rows: Floats, routing: Routing | None = None) -> None:
        """Inputs in the whole model, of the rows that `add` gets next. Those of experts are not kept, since
        they may be other tokens'."""
        if name == self._end:
            raise EnoughError
        if routing is None:
            self._whole[name] = rows.copy()

    def add(self, name: str, rows: Floats, routing: Routing | None = None) -> None:
        """`rows` [n, width]: inputs of weight `name`; with `routing`, of the matrices in it."""
        if name == self._end:
            raise EnoughError
        if routing is None:
            self._add((name, 0), rows)
            if (whole := self._whole.pop(name, None)) is not None:
                here = self._bring(rows)
                self._moved[name] = here.T @ (self._bring(whole) - here) + self._moved.get(name, 0)
            return
        tokens, used = routing.ids.shape
        row = np.arange(tokens)[:, None] * routing.slots + np.arange(used) % routing.slots
        for expert in np.unique(routing.ids):
            self._add((name, int(expert)), rows[row[routing.ids == expert]])

    def _add(self, key: tuple[str, int], rows: Floats) -> None:
        here = self._bring(rows)
        product = here.T @ here
        if key in self._sums:
            self._sums[key] += product
        else:
            self._sums[key] = product

    def total(self, name: str, matrix: int, width: int) -> Array:
        """The sum of one matrix [.., width] of the weight, which is then discarded; 0 if it read nothing.

        Raises:
            ConvertError: the inputs are not finite.
        """
        gram = self._sums.pop((name, matrix), None)
        if gram is None:
            gram = self._bring(np.zeros((width, width), np.float32))
        if not bool(namespace(gram).isfinite(gram).all()):
            raise ConvertError(f"the inputs of {name} are not finite; is the checkpoint intact?")
        return gram

    def take(self, name: str, matrix: int, width: int) -> Inputs:
        """The inputs of one matrix, from `total`. A matrix that read nothing has the identity, so no error is
        carried."""
        return Inputs(self.total(name, matrix, width), self._moved.pop(name, None))
