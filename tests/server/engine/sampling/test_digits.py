"""Numbers in JSON always end; digits elsewhere are not limited."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.llamacpp import Model
from qwen_serve.llamacpp.row_sampler import Bits
from qwen_serve.llamacpp.tokenizer import llguidance_tokenizer
from qwen_serve.server.engine.sampling.digits import MOST_DIGITS
from qwen_serve.server.engine.sampling.grammar import GrammarCompiler, GrammarConstraint

N = MOST_DIGITS


def unpacked(bits: Bits) -> npt.NDArray[np.uint8]:
    return np.unpackbits(bits.view(np.uint8), bitorder="little")


class Tool:
    """Follows texts with a grammar, one token a byte."""

    def __init__(self, model: Model, compiler: GrammarCompiler) -> None:
        self._compiler, self._end = compiler, model.eos
        self._ids = {model.piece(token, special=True): token for token in range(model.n_real)}

    def begin(self, grammar: str) -> GrammarConstraint:
        return self._compiler.compile(grammar).result().begin()

    def tokens(self, text: str) -> list[int]:
        return [self._ids[bytes([byte])] for byte in text.encode()]

    def reached(self, grammar: str, text: str) -> int:
        """Number of a text's tokens that are accepted; checks that the mask and the masks of a draft agree on
        each."""
        constraint = self.begin(grammar)
        before: list[Bits] = []
        tokens = self.tokens(text)
        for n, token in enumerate(tokens):
            mask = constraint.mask()
            masks = constraint.masks(tokens[n : n + 3])
            assert np.array_equal(unpacked(masks[0]), mask)
            assert n == 0 or len(before) < 2 or np.array_equal(masks[0], before[1])
            before = masks
            drafted = constraint.validate(tokens[n:])
            accepted = constraint.accept(token)
            assert accepted == bool(mask[token])
            assert drafted == 0 or accepted
            if not accepted:
                assert mask.any()
                return n
        return len(tokens)


@pytest.fixture(scope="module")
def tool(nano_f32: Path) -> Iterator[Tool]:
    model = Model(nano_f32, n_gpu_layers=0)
    compiler = GrammarCompiler(lambda: llguidance_tokenizer(model), model.eos)
    yield Tool(model, compiler)
    compiler.close()


def json_of(schema: Any) -> str:
    return f"start: %json {json.dumps(schema)}"


NUMBERS: dict[str, Any] = {
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "one bound": {"type": "integer", "minimum": -5},
    "anything": {},
    "several types": {"type": ["null", "number"]},
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("where", ["{}", '{{"a": {}', "[{}"])
def test_a_number_has_so_many_digits(tool: Tool, kind: str, where: str) -> None:
    schema = NUMBERS[kind]
    if where.startswith("{{"):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    elif where.startswith("["):
        schema = {"type": "array", "items": schema}
    before = where.format("")
    assert tool.reached(json_of(schema), before + "1" * 40) == len(before) + N


@pytest.mark.parametrize("part", ["0.", "1e", "-12.5e-"])
def test_so_do_fractions_and_exponents(tool: Tool, part: str) -> None:
    for schema in ({"type": "number"}, {}):
        assert tool.reached(json_of(schema), part + "3" * 40) == len(part) + N
    whole = f"{'1' * N}.{'2' * N}e{'3' * N}"
    assert tool.reached(json_of({"type": "array"}), f"[{whole}, {whole}]") == 2 * len(whole) + 4


def test_a_fraction_within_bounds_ends(tool: Tool) -> None:
    schema = json_of({"type": "number", "minimum": 0, "maximum": 1})
    assert tool.reached(schema, "0." + "3" * 40) == 2 + N


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, f'"{"1" * 40}"'),
        ({"type": "string", "pattern": "^[0-9]+$"}, f'"{"1" * 40}"'),
        ({"type": "string", "pattern": "^[0-9]{40}$"}, f'"{"1" * 40}"'),
        ({"type": "string", "minLength": 30}, f'"{"1" * 40}"'),
        ({"patternProperties": {"^[0-9]+$": {}}, "additionalProperties": False}, f'{{"{"1" * 40}": 1}}'),
        ({"const": 2**62}, str(2**62)),
        ({"enum": [2**62, 2**60, 7]}, str(2**62)),
        ({"type": "integer", "minimum": 10**17}, "1" * 18),
    ],
)
def test_other_digits_are_free(tool: Tool, schema: Any, text: str) -> None:
    constraint = tool.begin(json_of(schema))
    left = tool.tokens(text)
    while left:
        forced = constraint.forced()[: len(left)]
        assert forced == left[: len(forced)]
        left = left[len(forced) :]
        if left:
            assert constraint.mask()[left[0]]
            assert constraint.accept(left.pop(0))


def test_grammars_that_are_no_json_are_left_alone(tool: Tool) -> None:
    for grammar in ("start: /[0-9]+,/", 'start: NUMBER "," NUMBER\nNUMBER: /[0-9]+/'):
        assert tool.reached(grammar, "1" * 60) == 60


def test_whatever_is_drawn_ends(tool: Tool) -> None:
    """Numbers end even if the model always prefers digits."""
    digits = set(tool.tokens("0123456789.eE+-"))
    rng = random.Random(0)
    for _ in range(20):
        constraint = tool.begin(
            json_of({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2})
        )
        for _ in range(150):
            constraint.forced()
            allowed = np.flatnonzero(constraint.mask())
            liked = [token for token in allowed if int(token) in digits] or list(allowed)
            chosen = int(rng.choice(liked))
            assert constraint.accept(chosen)
            if constraint.forced():
                break
        else:
            raise AssertionError("it went on")
