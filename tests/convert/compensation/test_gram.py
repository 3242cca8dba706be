"""Gram matrices: the products of all rows, of an expert those that were sent to it."""

from __future__ import annotations

import pytest

from qwen_serve.convert.compensation.gram import EnoughError, Grams, Order
from qwen_serve.convert.compensation.worker import Worker
from qwen_serve.llamacpp.probe import Routing

import numpy as np  # isort: skip


class Sums(Worker):
    """Keeps what it is sent, as a plain sum."""

    def __init__(self) -> None:
        super().__init__(np.array)
        self.grams: dict[tuple[str, int], np.ndarray] = {}

    def add(self, key: tuple[str, int], rows: np.ndarray) -> None:
        super().add(key, rows)
        self.grams[key] = self.grams.get(key, 0) + rows.T @ rows


def test_rows_of_several_calls_add_up() -> None:
    rows = np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32)
    several, once = Worker(np.array), Worker(np.array)
    grams = Grams({"a"}, None, several)
    for part in np.split(rows, 3):
        grams.add("a", part)
    once.add(("a", 0), rows)
    off = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    for worker in (several, once):
        worker.prepare(("a", 0), 8)
    assert several.loss(off, off + 1) == pytest.approx(once.loss(off, off + 1), rel=1e-5)


@pytest.mark.parametrize("slots", [1, 2])
def test_an_expert_has_those_that_the_router_sent(slots: int) -> None:
    rng = np.random.default_rng(1)
    tokens, used, experts = 20, 2, 5
    ids = np.array([rng.choice(experts - 1, used, replace=False) for _ in range(tokens)], np.int32)
    rows = rng.standard_normal((tokens * slots, 8)).astype(np.float32)
    sums = Sums()
    Grams({"e"}, None, sums).add("e", rows, Routing(experts, ids, slots))
    expected = np.zeros((experts, 8, 8))
    for token in range(tokens):
        for i, expert in enumerate(ids[token]):
            row = rows[token * slots + i % slots].astype(np.float64)
            expected[expert] += np.outer(row, row)
    assert sums.grams.keys() == {("e", expert) for expert in range(experts - 1)}
    for (_, expert), found in sums.grams.items():
        np.testing.assert_allclose(found, expected[expert], rtol=1e-4, atol=1e-5)


def test_the_graph_need_not_go_on_behind_the_end() -> None:
    grams = Grams({"a"}, "b", Worker(np.array))
    assert [grams.observes(name) for name in "abc"] == [True, True, False]
    with pytest.raises(EnoughError):
        grams.add("b", np.ones((1, 8), np.float32))


def test_weights_that_read_one_tensor_are_read_together() -> None:
    order, rows = Order(), [np.ones((2, 8), np.float32) for _ in range(2)]
    for name, at in (("q", 0), ("k", 0), ("out", 1), ("q", 1)):
        order.add(name, rows[at])
    assert order.readings == [["q", "k"], ["out"]]
