"""The index finds what a search through the whole text finds, however the text came in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.engine.sequence import Sequence
from server.engine.speculation.base import Order
from server.engine.speculation.ngram import NgramDrafter
from server.engine.speculation.pool import BETWEEN, Pool
from server.engine.speculation.suffixes import SuffixIndex
from tests.server.engine.speculation.helpers import sequence

EVERYTHING = 10_000

texts = st.integers(1, 6).flatmap(lambda n: st.lists(st.integers(0, n), max_size=80))
"""Over few different tokens, so that much repeats."""


def longest_match(text: list[int], end: int | None = None) -> int:
    """Most tokens at the end of `text[:end]` that also end somewhere before."""
    end = len(text) if end is None else end
    best = 0
    for place in range(end):
        length = 0
        while length < place and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= 2 else 0


def check(index: SuffixIndex) -> None:
    text = index.tokens
    assert index.match == longest_match(text)
    if index.match:
        place, n = index.source, index.match
        assert place < len(text)
        assert text[place - n : place] == text[len(text) - n :]
        continued = text + index.continuation(30)
        assert all(continued[len(text) + i] == continued[place + i] for i in range(30))
    else:
        assert index.continuation(30) == []


@given(text=texts, split=st.integers(0, 80), data=st.data())
def test_the_longest_match_is_found(text: list[int], split: int, data: st.DataObject) -> None:
    tokens = text[:split]
    index = SuffixIndex(tokens, longest_compared=EVERYTHING, candidates=EVERYTHING)
    check(index)
    rest = text[split:]
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        tokens += rest[:n]
        index.update()
        check(index)
        rest = rest[n:]


@given(text=texts, other=texts)
def test_the_longest_match_in_another_text_is_found(text: list[int], other: list[int]) -> None:
    index = SuffixIndex(text, longest_compared=EVERYTHING, candidates=EVERYTHING)
    source, match = index.find(other)
    best = 0
    for place in range(len(text) + 1):
        length = 0
        while length < min(place, len(other)) and text[place - 1 - length] == other[-1 - length]:
            length += 1
        best = max(best, length)
    assert match == (best if best >= 2 else 0)
    if match:
        assert text[source - match : source] == other[len(other) - match :]


@given(text=texts)
def test_bounded_searches_find_true_matches(text: list[int]) -> None:
    index = SuffixIndex(text, longest_compared=5, candidates=2)
    n = index.match
    assert n <= max(longest_match(text), 0)
    assert n == 0 or text[index.source - n : index.source] == text[-n:]
    assert (n == 0) == (longest_match(text) == 0)


def test_a_period_goes_on_past_the_end() -> None:
    index = SuffixIndex([1, 2, 3] * 5)
    assert index.continuation(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert index.match == 12


def test_of_equal_matches_the_latest_counts() -> None:
    assert SuffixIndex([1, 2, 3, 9, 1, 2, 4, 8, 1, 2]).continuation(1) == [4]


def propose(drafter: NgramDrafter, one: Sequence, limit: int) -> Order:
    order = Order(one, limit)
    drafter.propose([order])
    return order


def test_the_drafter_follows_a_sequence_and_forgets_it() -> None:
    drafter = NgramDrafter()
    one = sequence([5, 6, 7, 8, 5, 6])
    assert propose(drafter, one, 3).tokens == [7, 8, 5]
    one.tokens.append(9)
    assert propose(drafter, one, 3).tokens == []
    one.tokens += [7, 8]
    order = propose(drafter, one, 2)
    assert (order.tokens, order.match, order.drafter) == ([5, 6], 2, "ngram")
    assert len(drafter.chances(order)) == 2
    assert propose(drafter, one, 0).tokens == []
    drafter.forget(one)
    drafter.forget(one)


def test_a_request_for_one_token_gets_no_index() -> None:
    drafter, one = NgramDrafter(), sequence([1, 2, 3] * 20)
    assert propose(drafter, one, 0).tokens == []
    assert not drafter._indexes
    one.tokens += [1, 2]
    assert propose(drafter, one, 4).tokens == [3, 1, 2, 3]


def test_what_was_read_meanwhile_is_known_when_asked() -> None:
    drafter, asked = NgramDrafter(), NgramDrafter()
    one = sequence([5, 6, 7, 8, 5, 6])
    for token in (7, 8, 9, 5, 6):
        drafter.read([one])
        one.tokens.append(token)
        if token == 8:
            propose(asked, one, 3)
    drafter.read([one])
    [index] = drafter._indexes.values()
    assert (index.source, index.match) == (6, 2)
    for each in (drafter, asked):
        assert propose(each, one, 3).tokens == [7, 8, 9]


def test_what_one_sequence_taught_helps_the_next() -> None:
    drafter = NgramDrafter()
    first, second = sequence([1, 2, 3] * 30), sequence([4, 5, 6] * 8)
    before = drafter.chances(propose(drafter, second, 1)) if propose(drafter, second, 1).tokens else None
    propose(drafter, first, 1)
    first.tokens += [1, 2, 3] * 30
    drafter.forget(first)
    after = drafter.chances(propose(drafter, second, 1))
    assert before is not None
    assert after[0] > before[0]


def test_the_pool_serves_what_other_requests_left() -> None:
    drafter = NgramDrafter(pool=Pool(100))
    first, second = sequence([1, 2, 3, 4, 5, 6]), sequence([9, 2, 3, 4])
    propose(drafter, first, 4)
    assert propose(drafter, second, 4).tokens == []
    drafter.forget(first)
    order = propose(drafter, second, 4)
    assert (order.tokens, order.match) == ([5, 6], 3)


def test_without_a_pool_requests_see_nothing_of_each_other() -> None:
    drafter = NgramDrafter()
    first, second = sequence([1, 2, 3, 4, 5, 6]), sequence([9, 2, 3, 4])
    propose(drafter, first, 4)
    drafter.forget(first)
    assert propose(drafter, second, 4).tokens == []


@given(st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=12), st.integers(0, 50))
def test_the_pool_keeps_to_its_size_and_within_texts(added: list[list[int]], capacity: int) -> None:
    pool = Pool(capacity)
    for text in added:
        pool.add(text)
        assert pool.size <= capacity
        passage = pool.find(text)
        assert BETWEEN not in passage.continuation(20)
        if passage.match:
            assert passage.text[passage.source - passage.match : passage.source] == text[-passage.match :]
