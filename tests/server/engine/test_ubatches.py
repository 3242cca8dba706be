"""Division of a ragged batch into ubatches."""

from hypothesis import given
from hypothesis import strategies as st

from qwen_serve.server.engine.ubatches import ubatches


def test_as_many_tokens_of_each_as_the_shortest_has_left() -> None:
    assert list(ubatches([1, 5, 3], 512)) == [[(0, 1), (1, 1), (2, 1)], [(1, 2), (2, 2)], [(1, 2)]]


def test_a_pass_holds_no_more_than_fit() -> None:
    assert list(ubatches([10], 4)) == [[(0, 4)], [(0, 4)], [(0, 2)]]
    assert list(ubatches([4, 4], 4)) == [[(0, 2), (1, 2)], [(0, 2), (1, 2)]]


def test_whose_end_would_be_parted_waits() -> None:
    assert list(ubatches([4, 2, 4, 2], 512, tail=5)) == [[(1, 2), (3, 2)], [(0, 4), (2, 4)]]


def test_nobody_waits_whose_end_is_far() -> None:
    assert list(ubatches([2, 9], 512, tail=5)) == [[(0, 2), (1, 2)], [(1, 7)]]


def test_the_end_of_a_long_prompt_stays_whole() -> None:
    assert list(ubatches([18], 16, tail=5)) == [[(0, 13)], [(0, 5)]]


def test_a_ragged_pass_has_one_sequence_after_the_other() -> None:
    assert list(ubatches([5, 1, 3, 1], 512, ragged=True)) == [[(0, 5), (1, 1), (2, 3), (3, 1)]]
    assert list(ubatches([5, 1, 3], 7, ragged=True)) == [[(0, 5), (1, 1), (2, 1)], [(2, 2)]]
    assert list(ubatches([18], 8, ragged=True)) == [[(0, 8)], [(0, 8)], [(0, 2)]]


def test_a_ragged_pass_leaves_ends_whole() -> None:
    assert list(ubatches([6, 4], 8, 3, ragged=True)) == [[(0, 6), (1, 1)], [(1, 3)]]
    assert list(ubatches([6, 3], 8, 3, ragged=True)) == [[(0, 6)], [(1, 3)]]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    n_ubatch=st.integers(16, 64),
    tail=st.integers(0, 9),
    ragged=st.booleans(),
)
def test_every_token_is_computed_once_and_ends_stay_whole(
    lengths: list[int], n_ubatch: int, tail: int, ragged: bool
) -> None:
    left = list(lengths)
    for one in ubatches(lengths, n_ubatch, tail, ragged=ragged):
        assert one
        assert sum(length for _, length in one) <= n_ubatch
        assert ragged or len({length for _, length in one}) == 1
        for index, length in one:
            assert length > 0
            left[index] -= length
            assert left[index] == 0 or left[index] >= tail
    assert not any(left)
