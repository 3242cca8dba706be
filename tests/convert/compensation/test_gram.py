"""Gram matrices are sums over all input rows; for an expert, over the rows that were routed to it."""

import pytest
from gguf import GGMLQuantizationType as Type

from qwen_serve.convert.compensation.gram import EnoughError, Grams, Order
from qwen_serve.convert.compensation.grids import GRIDS
from qwen_serve.convert.compensation.packing import pack
from qwen_serve.convert.compensation.rounding import Inputs, round_compensated
from qwen_serve.convert.errors import ConvertError
from qwen_serve.llamacpp.probe import Routing

import numpy as np  # isort: skip


RNG = np.random.default_rng(3)


def test_rows_of_several_calls_add_up() -> None:
    rows = RNG.standard_normal((30, 8)).astype(np.float32)
    several, once = Grams({"a"}, None, np.array), Grams({"a"}, None, np.array)
    for part in np.split(rows, 3):
        several.add("a", part)
    once.add("a", rows)
    np.testing.assert_allclose(several.take("a", 0, 8).gram, once.take("a", 0, 8).gram, rtol=1e-5, atol=1e-6)


def test_without_inputs_no_error_is_carried_on() -> None:
    none, plain = Grams({"a"}, None, np.array), Grams({"a"}, None, np.array)
    plain.add("a", np.eye(256, dtype=np.float32))
    values, found = RNG.standard_normal((256, 4)).astype(np.float32), []
    for grams in (none, plain):
        inputs = grams.take("a", 0, 256)
        np.testing.assert_allclose(inputs.gram, np.eye(256) * inputs.gram[0, 0])
        found.append(pack(Type.Q6_K, round_compensated(values, inputs, GRIDS[Type.Q6_K])).tobytes())
    assert found[0] == found[1]


def test_inputs_that_are_not_finite_name_their_weight() -> None:
    grams = Grams({"a"}, None, np.array)
    grams.add("a", np.array([[1.0, np.inf]], np.float32))
    with pytest.raises(ConvertError, match="inputs of a are not finite"):
        grams.take("a", 0, 2)


@pytest.mark.parametrize("slots", [1, 2])
def test_an_expert_has_those_that_the_router_sent(slots: int) -> None:
    tokens, used, experts = 20, 2, 5
    ids = np.array([RNG.choice(experts - 1, used, replace=False) for _ in range(tokens)], np.int32)
    rows = RNG.standard_normal((tokens * slots, 8)).astype(np.float32)
    grams = Grams({"e"}, None, np.array)
    grams.add("e", rows, Routing(experts, ids, slots))
    expected = np.zeros((experts, 8, 8))
    for token in range(tokens):
        for i, expert in enumerate(ids[token]):
            row = rows[token * slots + i % slots].astype(np.float64)
            expected[expert] += np.outer(row, row)
    for expert, gram in enumerate(expected):
        wanted = Inputs(gram.astype(np.float32)).gram  # the last got none
        np.testing.assert_allclose(grams.take("e", expert, 8).gram, wanted, rtol=1e-4, atol=1e-5)


def test_the_graph_need_not_go_on_behind_the_end() -> None:
    grams = Grams({"a"}, "b", np.array)
    assert [grams.observes(name) for name in "abc"] == [True, True, False]
    with pytest.raises(EnoughError):
        grams.add("b", np.ones((1, 8), np.float32))


def test_weights_that_read_one_tensor_are_read_together() -> None:
    order, rows = Order(), [np.ones((2, 8), np.float32) for _ in range(2)]
    for name, at in (("q", 0), ("k", 0), ("out", 1), ("q", 1)):
        order.add(name, rows[at])
    assert order.readings == [["q", "k"], ["out"]]


def test_a_change_of_the_inputs_is_taken_back() -> None:
    """The whole model's inputs are another product of these inputs: the weights take over its matrix."""
    width, grams = 32, Grams({"a"}, "b", np.array)
    change = RNG.standard_normal((width, width)).astype(np.float32) / np.float32(width)
    values = RNG.standard_normal((width, 4)).astype(np.float32)
    for _ in range(3):
        rows = RNG.standard_normal((2000, width)).astype(np.float32)
        whole = rows + rows @ change
        grams.keep("a", whole)
        whole[:] = 0  # the buffer is llama.cpp's
        grams.add("a", rows)
    inputs = grams.take("a", 0, width)
    wanted = (rows + rows @ change) @ values
    assert (
        np.square(rows @ inputs.corrected(values) - wanted).mean()
        < 1e-3 * np.square(rows @ values - wanted).mean()
    )
    with pytest.raises(EnoughError):
        grams.keep("b", rows)


def test_without_the_whole_models_inputs_nothing_is_corrected() -> None:
    grams = Grams({"a"}, None, np.array)
    routing = Routing(ids=np.array([[0], [1]]), slots=1, experts=2)
    rows = RNG.standard_normal((2, 8)).astype(np.float32)
    grams.keep("a", rows, routing)
    grams.add("a", rows, routing)
    values = RNG.standard_normal((8, 4)).astype(np.float32)
    assert grams.take("a", 0, 8).corrected(values) is values
