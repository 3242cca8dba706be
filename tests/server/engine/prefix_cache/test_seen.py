"""How much of a text was read before."""

from __future__ import annotations

import random

from server.engine.prefix_cache.seen import BLOCK, Seen


def test_it_knows_the_beginnings_that_texts_share() -> None:
    seen, text = Seen(), list(range(10 * BLOCK))
    assert seen.read(text) == 0
    assert seen.read(text) == 10 * BLOCK
    assert seen.read([*text, *range(100)]) == 10 * BLOCK
    assert seen.read([*text[: 5 * BLOCK - 1], -1, *text[5 * BLOCK :]]) == 4 * BLOCK
    assert seen.read(text[BLOCK:]) == 0, "the same tokens behind others are another text"
    assert seen.read(text[: BLOCK - 1]) == 0
    assert seen.read([]) == 0


def test_a_beginning_that_is_forgotten_hides_what_follows() -> None:
    seen = Seen(limit=3)
    first, second = list(range(4 * BLOCK)), list(range(1000, 1000 + BLOCK))
    seen.read(first)
    assert seen.read(first) == 0, "its first block went for its last"
    seen.read(second)
    assert seen.read(second) == BLOCK


def test_what_was_read_lately_is_remembered() -> None:
    seen, rng = Seen(limit=8), random.Random(1)
    often = list(range(2 * BLOCK))
    seen.read(often)
    for _ in range(50):
        seen.read([rng.randrange(10**6) for _ in range(5 * BLOCK)])
        assert seen.read(often) == 2 * BLOCK
        assert len(seen._hashes) <= 8
