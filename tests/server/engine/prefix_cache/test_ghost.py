"""How much of a text was read before."""

from __future__ import annotations

import random

from qwen_serve.server.engine.prefix_cache.ghost import BLOCK, GhostCache


def test_it_knows_the_beginnings_that_texts_share() -> None:
    ghost, text = GhostCache(), list(range(10 * BLOCK))
    assert ghost.read(text) == 0
    assert ghost.read(text) == 10 * BLOCK
    assert ghost.read([*text, *range(100)]) == 10 * BLOCK
    assert ghost.read([*text[: 5 * BLOCK - 1], -1, *text[5 * BLOCK :]]) == 4 * BLOCK
    assert ghost.read(text[BLOCK:]) == 0, "the same tokens behind others are another text"
    assert ghost.read(text[: BLOCK - 1]) == 0
    assert ghost.read([]) == 0


def test_a_beginning_that_is_forgotten_hides_what_follows() -> None:
    ghost = GhostCache(limit=3)
    first, second = list(range(4 * BLOCK)), list(range(1000, 1000 + BLOCK))
    ghost.read(first)
    assert ghost.read(first) == 0, "its first block went for its last"
    ghost.read(second)
    assert ghost.read(second) == BLOCK


def test_what_was_read_lately_is_remembered() -> None:
    ghost, rng = GhostCache(limit=8), random.Random(1)
    often = list(range(2 * BLOCK))
    ghost.read(often)
    for _ in range(50):
        ghost.read([rng.randrange(10**6) for _ in range(5 * BLOCK)])
        assert ghost.read(often) == 2 * BLOCK
        assert len(ghost._hashes) <= 8
