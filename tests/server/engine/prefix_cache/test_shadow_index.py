"""The length of a text's beginning that was read before."""

import random

from qwen_serve.server.engine.prefix_cache.shadow_index import BLOCK, ShadowIndex


def test_it_knows_the_beginnings_that_texts_share() -> None:
    shadow, text = ShadowIndex(), list(range(10 * BLOCK))
    assert shadow.read(text) == 0
    assert shadow.read(text) == 10 * BLOCK
    assert shadow.read([*text, *range(100)]) == 10 * BLOCK
    assert shadow.read([*text[: 5 * BLOCK - 1], -1, *text[5 * BLOCK :]]) == 4 * BLOCK
    assert shadow.read(text[BLOCK:]) == 0, "the same tokens behind others are another text"
    assert shadow.read(text[: BLOCK - 1]) == 0
    assert shadow.read([]) == 0


def test_a_beginning_that_is_forgotten_hides_what_follows() -> None:
    shadow = ShadowIndex(limit=3)
    first, second = list(range(4 * BLOCK)), list(range(1000, 1000 + BLOCK))
    shadow.read(first)
    assert shadow.read(first) == 0, "its first block went for its last"
    shadow.read(second)
    assert shadow.read(second) == BLOCK


def test_what_was_read_lately_is_remembered() -> None:
    shadow, rng = ShadowIndex(limit=8), random.Random(1)
    often = list(range(2 * BLOCK))
    shadow.read(often)
    for _ in range(50):
        shadow.read([rng.randrange(10**6) for _ in range(5 * BLOCK)])
        assert shadow.read(often) == 2 * BLOCK
