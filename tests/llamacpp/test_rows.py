"""The host's reading of figures from the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from qwen_serve.llamacpp import DeviceSampler, Rows
from qwen_serve.llamacpp.device_sampler import n_blocks
from qwen_serve.llamacpp.rows import best_but_ends, best_tokens, guesses, log_sums

if TYPE_CHECKING:
    import numpy.typing as npt


@pytest.mark.parametrize(
    ("n_vocab", "blocks"),
    [(248_320, 128), (151_936, 128), (3712, 128), (50_257, 29), (32_003, 1), (96, 6), (31, 1), (4, 1)],
)
def test_rows_are_cut_into_equal_blocks(n_vocab: int, blocks: int) -> None:
    """Few where the vocabulary has no divisor that would do, as a prime number of tokens."""
    assert n_blocks(n_vocab) == blocks


SIZES = [1, 31, 30 * 31, 128 * 40]
"""Vocabularies of one block and of many."""


def logits_of(n_vocab: int, n: int = 40) -> npt.NDArray[np.float32]:
    """Logits with few distinct values, so that some rows have several best tokens."""
    return np.random.default_rng(n_vocab).normal(0, 3, (n, n_vocab)).round(1).astype(np.float32)


def best_figures(
    logits: npt.NDArray[np.float32], ends: list[int], n_real: int
) -> tuple[npt.NDArray[np.float32], int]:
    """(the device's figures for BEST, number of blocks)."""
    n, n_vocab = logits.shape
    blocks = n_blocks(n_vocab)
    going_on = logits.copy()
    going_on[:, n_real:] = going_on[:, ends] = -np.inf
    local = going_on.reshape(n, blocks, -1).argmax(axis=2)
    tokens = local + np.arange(0, n_vocab, n_vocab // blocks)
    banned = np.isinf(going_on.reshape(n, blocks, -1)).all(axis=2)
    tokens[banned] = np.isfinite(going_on[0]).argmax()
    tokens = np.concatenate([np.tile(ends, (n, 1)), tokens], axis=1).astype(np.int64)
    sums = logits.reshape(n, blocks, -1).sum(axis=2)
    values = np.take_along_axis(logits, tokens, axis=1)
    return np.concatenate([tokens, values, sums], axis=1).astype(np.float32), blocks


@pytest.mark.parametrize("ends", [0, 1, 5])
@pytest.mark.parametrize("n_vocab", SIZES[1:])
def test_the_best_of_blocks(n_vocab: int, ends: int) -> None:
    logits, n_real = logits_of(n_vocab), n_vocab - n_vocab // 10
    banned = np.random.default_rng(1).permutation(n_real)[:ends]
    logits[: len(logits) // 2, banned] += 5  # an end is the best, or as good as the best
    figures, blocks = best_figures(logits, sorted(banned.tolist()), n_real)
    assert best_tokens(figures, blocks).tolist() == logits[:, :n_real].argmax(axis=1).tolist()
    logits[:, banned] = -np.inf
    assert best_but_ends(figures, blocks).tolist() == logits[:, :n_real].argmax(axis=1).tolist()


@pytest.mark.parametrize("n_vocab", SIZES)
def test_the_probability_from_blocks(n_vocab: int) -> None:
    logits = logits_of(n_vocab)
    n, blocks = len(logits), n_blocks(n_vocab)
    found = guesses(guess_figures(logits), n_vocab // blocks)
    assert found[0].tolist() == logits.argmax(axis=1).tolist()
    chances = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found[1], chances.max(axis=1), rtol=1e-5)
    sums = np.log(np.exp(logits.astype(float)).sum(axis=1))
    np.testing.assert_allclose(log_sums(guess_figures(logits)), sums, rtol=1e-6)
    np.testing.assert_allclose(log_sums(guess_figures(logits + 500)), sums + 500, rtol=1e-6)
    for spoilt in (np.nan, np.inf):
        bad = logits.copy()
        bad[np.arange(n), np.arange(n) % n_vocab] = spoilt
        assert np.isnan(guesses(guess_figures(bad), n_vocab // blocks)[1]).all()
        assert np.isnan(log_sums(guess_figures(bad))).all()


def guess_figures(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The device's figures for GUESS. Its argmax ignores NaN."""
    pieces = logits.reshape(len(logits), n_blocks(logits.shape[1]), -1)
    places = np.where(np.isnan(pieces), -np.inf, pieces).argmax(axis=2)
    with np.errstate(invalid="ignore"):
        chances = np.exp(pieces - pieces.max(axis=2, keepdims=True))
        chances /= chances.sum(axis=2, keepdims=True)
    each = [np.take_along_axis(found, places[:, :, None], axis=2)[:, :, 0] for found in (pieces, chances)]
    return np.concatenate([places, *each], axis=1).astype(np.float32)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, -np.inf])
def test_unusable_logits_are_noticed(spoilt: float) -> None:
    logits = logits_of(30 * 31, 3)
    expected = logits.argmax(axis=1).tolist()
    logits[1, 77] = spoilt
    figures, blocks = best_figures(logits, [3, 4], 900)
    rows = Rows(0, logits.shape[1], 900)

    def fill(kinds: list[DeviceSampler], figures: npt.NDArray[np.float32]) -> None:
        rows.fill(kinds, range(len(kinds)), None)
        rows._n_figures[DeviceSampler.BEST] = 2 * (blocks + 2) + blocks  # noqa: SLF001 - made-up figures
        rows._outputs["probs"] = np.pad(  # noqa: SLF001 - likewise
            figures, ((0, 0), (0, 930 - figures.shape[1])), constant_values=np.nan
        )

    fill([DeviceSampler.BEST] * 3, figures)
    assert rows.all_best() is None
    assert (rows.best(0), rows.best(2), rows.best_but_end(2)) == (expected[0], expected[2], expected[2])
    for ask in (rows.best, rows.best_but_end):
        with pytest.raises(FloatingPointError, match="no usable logits"):
            ask(1)
    fill([DeviceSampler.BEST] * 2, figures[[0, 2]])
    assert rows.all_best() == [expected[0], expected[2]]
    if spoilt != -np.inf:  # that a chance of nothing is none is right
        fill([DeviceSampler.GUESS] * 3, guess_figures(logits))
        assert rows.best(0) == expected[0]
        with pytest.raises(FloatingPointError):
            rows.best(1)
    # a row of another kind in between, with anything in its memory
    fill([DeviceSampler.BEST, DeviceSampler.ROW, DeviceSampler.BEST], figures)
    assert (rows.best(0), rows.best(2), rows.all_best()) == (expected[0], expected[2], None)
