"""States of the delta nets in F16: computed in F32, rounded after every token."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.llamacpp import HAS_STATE_F16, Context, Model
from qwen_serve.llamacpp.context import HAS_BATCH_INVARIANCE
from qwen_serve.llamacpp.errors import LlamaError
from tests.contexts import exact_options

Rows = dict[tuple[int, ...], npt.NDArray[np.float32]]

SEQUENCES = 4


@pytest.fixture(autouse=True)
def _needs_the_patch() -> None:
    if not HAS_STATE_F16 or not HAS_BATCH_INVARIANCE:
        pytest.skip("llama.cpp has no patch state-f16")


def context(model: Model, state_type: str = "f16", **more: Any) -> Context:
    sizes = {"n_ctx": 1024, "n_batch": 256, "n_outputs": 256, "n_seq": SEQUENCES, "batch_invariant": True}
    return Context(model, exact_options(**{**sizes, **more}, state_type=state_type))


def decode(opened: Context, held: dict[int, tuple[int, ...]], parts: dict[int, list[int]]) -> Rows:
    """Read these tokens in one call; returns the row of each, by what its sequence holds then."""
    wanted: list[tuple[int, ...]] = []
    for which, tokens in parts.items():
        for token in tokens:
            n, at = len(wanted), held.get(which, ())
            opened.tokens[n], opened.positions[n] = token, len(at)
            opened.sequences[n], opened.outputs[n] = which, True
            held[which] = (*at, token)
            wanted.append(held[which])
    opened.decode(len(wanted))
    return {key: row.copy() for key, row in zip(wanted, opened.logits(len(wanted)), strict=True)}


@pytest.mark.parametrize("seed", range(4))
def test_bits_depend_on_neither_load_nor_cuts(model: Model, seed: int) -> None:
    rng = np.random.default_rng(seed)
    opened = context(model, unified=False)
    held: dict[int, tuple[int, ...]] = {}
    rows: Rows = {}
    for _ in range(12):
        chosen = rng.permutation(SEQUENCES)[: rng.integers(1, SEQUENCES + 1)]
        parts = {int(which): rng.integers(256, 2000, rng.integers(1, 9)).tolist() for which in chosen}
        rows |= decode(opened, held, parts)
    saved = {which: opened.save(which).tobytes() for which in held}
    opened.close()
    for which, history in held.items():
        alone, one = context(model, unified=False), dict[int, tuple[int, ...]]()
        for token in history:
            [(key, row)] = decode(alone, one, {which: [token]}).items()
            np.testing.assert_array_equal(rows[key], row)
        assert alone.save(which).tobytes() == saved[which]
        alone.close()


@pytest.mark.parametrize("snapshots", [0, 3])
def test_rows_are_close_to_those_of_f32_states(model: Model, snapshots: int) -> None:
    tokens = np.random.default_rng(7).integers(256, 2000, 256).tolist()
    found = {}
    for state_type in ("f32", "f16"):
        opened = context(model, state_type, n_snapshots=snapshots, batch_invariant=False)
        rows = np.array([*decode(opened, {}, {0: tokens}).values()], np.float64)
        found[state_type] = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
        opened.close()
    p, q = found["f32"], found["f16"]
    divergence = (np.exp(p) * (p - q)).sum(axis=-1)
    assert 0 < divergence.mean() < 1e-5
    assert divergence.max() < 1e-3


def test_a_state_takes_half_and_is_read_in_its_own_type_only(model: Model) -> None:
    tokens = np.random.default_rng(8).integers(256, 2000, 9).tolist()
    opened = {state_type: context(model, state_type) for state_type in ("f32", "f16")}
    saved = {}
    for state_type, one in opened.items():
        decode(one, {}, {0: tokens})
        saved[state_type] = one.save(0)
    # nano: 6 layers with 4 heads of 64 x 64
    assert saved["f32"].size - saved["f16"].size == 6 * 4 * 64 * 64 * 2
    for mine, other in (("f32", "f16"), ("f16", "f32")):
        with pytest.raises(LlamaError, match="could not restore"):
            opened[mine].restore(1, saved[other])
        opened[mine].restore(1, saved[mine])
        row = decode(opened[mine], {0: tuple(tokens), 1: tuple(tokens)}, {0: [300], 1: [301]})
        again = decode(opened[mine], {2: ()}, {2: [*tokens, 301]})
        np.testing.assert_allclose(row[*tokens, 301], again[*tokens, 301], atol=1e-4, rtol=0)
    for one in opened.values():
        one.close()
