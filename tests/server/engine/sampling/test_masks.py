"""The masks of a step's rows, which are computed together."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from qwen_serve.llamacpp import Model
from qwen_serve.llamacpp.row_sampler import Bits
from qwen_serve.llamacpp.tokenizer import llguidance_tokenizer
from qwen_serve.server.engine.errors import FormatTooComplex
from qwen_serve.server.engine.sampling import GrammarCompiler
from qwen_serve.server.engine.sampling.grammar import GrammarConstraint, MaskWriter
from tests.server.engine.sampling.constraints import Fickle

GRAMMARS = [
    r"start: /[a-z ]{3,40}/",
    r'start: /[0-9]+/ ("," /[a-f]+/)*',
    'start: %json {"type": "array", "items": {"type": "number"}, "minItems": 9}',
    r'start: ("yes" | "no" | /[k-t]+/) "."',
]


@pytest.fixture(scope="module")
def compiler(nano_f32: Path) -> Iterator[tuple[GrammarCompiler, Model]]:
    model = Model(nano_f32, n_gpu_layers=0)
    made = GrammarCompiler(lambda: llguidance_tokenizer(model), model.eos)
    yield made, model
    made.close()
    model.close()


ORDINARY = range(256, 2000)
"""Tokens of nano that end nothing."""


def allowed(bits: Bits) -> list[int]:
    tokens: list[int] = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    return [token for token in tokens if token < ORDINARY.stop]


def walk(constraint: GrammarConstraint, rng: random.Random, steps: int) -> list[int]:
    """Accept allowed tokens; return them."""
    taken: list[int] = []
    for _ in range(steps):
        constraint.forced()
        if constraint.matcher.is_stopped() or not (tokens := allowed(constraint.masks(())[0])):
            break
        taken.append(token := rng.choice(tokens))
        assert constraint.accept(token)
    return taken


def draft_of(constraint: GrammarConstraint, rng: random.Random) -> list[int]:
    """Tokens that may come next, perhaps with one that may not."""
    draft: list[int] = []
    for _ in range(rng.randrange(4)):
        masks = constraint.masks(draft)
        if len(masks) <= len(draft) or not (tokens := allowed(masks[-1])):
            break
        draft.append(rng.choice(tokens))
    return draft if rng.random() < 0.7 else [*draft, rng.choice(ORDINARY)]


def same(found: Sequence[Bits], expected: Sequence[Bits], valid: int) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found[: valid + 1], expected[: valid + 1], strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_masks_are_the_same_together_and_alone(compiler: tuple[GrammarCompiler, Model], seed: int) -> None:
    """Also behind drafts, and where numbers are bounded. Nothing is accepted."""
    rng = random.Random(seed)
    grammars = [compiler[0].compile(text).result() for text in GRAMMARS]
    writer = MaskWriter()
    for n in (1, 9, 3, 20):
        constraints = [rng.choice(grammars).begin() for _ in range(n)]
        for one in constraints:
            walk(one, rng, rng.randrange(25))
        asked = [(one, draft_of(one, rng)) for one in constraints]
        alone = [one.masks(draft) for one, draft in asked]
        for _ in range(2):
            together = writer.write(asked)
            for (one, draft), found, expected in zip(asked, together, alone, strict=True):
                assert not isinstance(found, Exception)
                assert same(found, expected, one.validate(draft))


def test_the_error_of_a_grammar_is_in_its_own_place(compiler: tuple[GrammarCompiler, Model]) -> None:
    grammar = compiler[0].compile(GRAMMARS[0]).result()
    good, bad, last = (grammar.begin("this field") for _ in range(3))
    other = Fickle(compiler[1].n_vocab)
    expected = [good.masks(()), other.masks(())]
    assert not bad.matcher.consume_token(compiler[1].eos)  # it is in a state of error from now on
    found = MaskWriter().write([(good, ()), (bad, ()), (other, ()), (last, [400])])
    assert isinstance(found[1], FormatTooComplex)
    assert "this field" in str(found[1])
    assert [same(found[0], expected[0], 0), same(found[2], expected[1], 0)] == [True, True]  # type: ignore[arg-type]
    assert not isinstance(found[3], Exception)
    assert MaskWriter().write([]) == []
