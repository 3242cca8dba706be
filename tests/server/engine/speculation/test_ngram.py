"""The lookup agrees with a search through the whole text, however the text was added."""

from hypothesis import given
from hypothesis import strategies as st

from qwen_serve.server.engine.request import Request
from qwen_serve.server.engine.speculation.base import Draft, Drafter, DraftRequest
from qwen_serve.server.engine.speculation.ngram import MATCHES, Lookup, NgramDrafter
from tests.server.engine.inside import lookups
from tests.server.engine.speculation.helpers import sequence

texts = st.integers(1, 6).flatmap(lambda n: st.lists(st.integers(0, n), max_size=80))
"""Over few different tokens, so that much repeats."""


def latest(text: list[int], length: int) -> int:
    """The end of the latest earlier occurrence of the last `length` tokens, or -1."""
    for place in range(len(text) - 1, length - 1, -1):
        if text[place - length : place] == text[len(text) - length :]:
            return place
    return -1


def check(lookup: Lookup) -> None:
    text, n = lookup.tokens, lookup.match
    if n:
        assert lookup.source < len(text)
        assert text[lookup.source - n : lookup.source] == text[len(text) - n :]
        continued = text + lookup.continuation(30)
        assert all(continued[len(text) + i] == continued[lookup.source + i] for i in range(30))
    else:
        assert latest(text, min(MATCHES)) < 0 or len(text) <= min(MATCHES)
        assert lookup.continuation(30) == []


@given(text=texts)
def test_the_latest_of_the_longest_matches_is_found(text: list[int]) -> None:
    lookup = Lookup(text)
    lookup.update()
    check(lookup)
    found = [length for length in MATCHES if len(text) > length and latest(text, length) >= 0]
    assert lookup.match == max(found, default=0)
    if found:
        assert lookup.source == latest(text, max(found))


@given(text=texts, split=st.integers(0, 80), data=st.data())
def test_what_is_found_agrees_however_the_text_grows(
    text: list[int], split: int, data: st.DataObject
) -> None:
    tokens = text[:split]
    lookup, rest = Lookup(tokens), text[split:]
    lookup.update()
    check(lookup)
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        tokens += rest[:n]
        lookup.update()
        check(lookup)
        rest = rest[n:]


def test_the_largest_token_ids_are_told_apart() -> None:
    text = [0xD800 + i for i in range(70)] + [248_319, 0x10FFFF, 10, 7, 248_319, 0x10FFFF, 10]
    lookup = Lookup(text)
    lookup.update()
    assert lookup.continuation(1) == [7]


def test_a_period_goes_on_past_the_end() -> None:
    lookup = Lookup([1, 2, 3] * 7)
    lookup.update()
    assert lookup.continuation(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert lookup.match == 16
    lookup.tokens += [1, 2]
    lookup.update()
    assert lookup.match == 18, "the occurrence moves along"


def test_no_row_of_a_picture_is_drafted() -> None:
    lookup = Lookup([1, 2, 3, 4, -7, -8, 5, 6, 1, 2, 3])
    lookup.update()
    assert lookup.continuation(8) == [4]
    lookup.tokens.append(4)  # and now the picture itself would be next
    lookup.update()
    assert lookup.continuation(8) == []


def test_of_equal_matches_the_latest_counts() -> None:
    lookup = Lookup([0, 1, 2, 3, 9, 0, 1, 2, 4, 8, 0, 1, 2])
    lookup.update()
    assert lookup.continuation(1) == [4]


def propose(drafter: Drafter, one: Request, limit: int) -> Draft:
    [draft] = drafter.propose([DraftRequest(one, 0, limit)])
    return draft


def test_the_drafter_follows_a_sequence_and_forgets_it() -> None:
    drafter = NgramDrafter(255, 16)
    one = sequence([4, 5, 6, 7, 8, 4, 5, 6])
    assert propose(drafter, one, 3) == Draft([7, 8, 4], "match-3")
    one.tokens.append(9)
    assert propose(drafter, one, 3) == Draft()
    one.tokens += [4, 5, 6]
    assert propose(drafter, one, 2) == Draft([9, 4], "match-3")
    assert not drafter.can_draft(DraftRequest(one, 0, 0))
    drafter.forget(one)
    drafter.forget(one)
    assert lookups(drafter) == 0


def test_longer_matches_are_judged_apart() -> None:
    drafter, kinds = NgramDrafter(255, 16), []
    one = sequence([*range(20), 99])
    for token in range(18):
        one.tokens.append(token)
        kinds.append(propose(drafter, one, 4).kind)
    assert kinds == ["", "", *["match-3"] * 3, *["match-6"] * 10, *["match-16"] * 3]
    assert set(kinds) - {""} == set(drafter.kinds)


def test_requests_see_nothing_of_each_other() -> None:
    drafter = NgramDrafter(255, 16)
    first, second = sequence([1, 2, 3, 4, 5, 6]), sequence([9, 2, 3, 4])
    propose(drafter, first, 4)
    assert propose(drafter, second, 4) == Draft()
    drafter.forget(first)
    assert propose(drafter, second, 4) == Draft()
