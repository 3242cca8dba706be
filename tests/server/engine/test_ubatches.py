"""The ubatches of a ragged batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qwen_serve.server.engine.ubatches import ubatches


def test_as_many_tokens_of_each_as_the_shortest_has_left() -> None:
    assert list(ubatches([1, 5, 3], 512)) == [(1, [0, 1, 2]), (2, [1, 2]), (2, [1])]


def test_a_pass_holds_no_more_than_fit() -> None:
    assert list(ubatches([10], 4)) == [(4, [0]), (4, [0]), (2, [0])]
    assert list(ubatches([4, 4], 4)) == [(2, [0, 1]), (2, [0, 1])]


def test_whose_end_would_be_parted_waits() -> None:
    assert list(ubatches([4, 2, 4, 2], 512, tail=5)) == [(2, [1, 3]), (4, [0, 2])]


def test_nobody_waits_whose_end_is_far() -> None:
    assert list(ubatches([2, 9], 512, tail=5)) == [(2, [0, 1]), (7, [1])]


def test_the_end_of_a_long_prompt_stays_whole() -> None:
    assert list(ubatches([18], 16, tail=5)) == [(13, [0]), (5, [0])]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    n_ubatch=st.integers(16, 64),
    tail=st.integers(0, 9),
)
def test_every_token_is_computed_once_and_ends_stay_whole(
    lengths: list[int], n_ubatch: int, tail: int
) -> None:
    left = list(lengths)
    for length, taken in ubatches(lengths, n_ubatch, tail):
        assert length > 0
        assert taken
        assert length * len(taken) <= n_ubatch
        for index in taken:
            left[index] -= length
            assert left[index] == 0 or left[index] >= tail
    assert not any(left)
