"""Chances: assumed at first, learnt from events, faded when the text changes."""

from __future__ import annotations

import random

import pytest

from server.engine.speculation.acceptance import ASSUMED, Confidence, Record, doubt


def test_long_matches_are_trusted_more_and_grow_with_each_hit() -> None:
    chances = Record().chances(2, 20, Record())
    assert chances == pytest.approx([ASSUMED[0]] * 2 + [ASSUMED[1]] * 12 + [ASSUMED[2]] * 6)


@pytest.mark.parametrize(("match", "truth"), [(2, 0.1), (5, 0.6), (40, 0.99)])
def test_a_record_learns_its_own_rate(match: int, truth: float) -> None:
    rng, record, broad = random.Random(0), Record(), Record()
    for _ in range(500):
        record.add(match, rng.random() < truth)
    assert record.chances(match, 1, broad)[0] == pytest.approx(truth, abs=0.12)


def test_what_others_experienced_serves_a_new_sequence() -> None:
    broad, done = Record(), Record()
    for _ in range(60):
        done.add(3, True)
    broad.merge(done)
    assert Record().chances(3, 1, broad)[0] > 0.9
    assert Record().chances(6, 1, broad)[0] == pytest.approx(ASSUMED[1])


def test_a_record_follows_a_text_that_changes() -> None:
    record = Record()
    for _ in range(1000):
        record.add(20, True)
    for _ in range(60):
        record.add(20, False)
    assert record.chances(20, 1, Record())[0] < 0.5


def test_confidence_is_taken_at_its_word_until_it_was_wrong() -> None:
    own, broad = Confidence(), Confidence()
    assert own.errors(broad) == 1
    rng = random.Random(1)
    for _ in range(200):  # sure of everything, right in six of ten
        accepted = 0
        while accepted < 4 and rng.random() < 0.6:
            accepted += 1
        for one in (own, broad):
            one.add([1.0] * 4, accepted)
    assert 1 - own.errors(broad) * doubt(1.0) == pytest.approx(0.6, abs=0.1)
    assert own.chances(broad, 4) == pytest.approx([0.6] * 4, abs=0.15)
    assert 1 - Confidence().errors(broad) * doubt(1.0) == pytest.approx(0.6, abs=0.15)


def test_an_honest_head_keeps_its_trust() -> None:
    own, broad, rng = Confidence(), Confidence(), random.Random(2)
    for _ in range(300):
        sure = [rng.uniform(0.3, 1) for _ in range(4)]
        accepted = 0
        while accepted < 4 and rng.random() < sure[accepted]:
            accepted += 1
        own.add(sure, accepted)
    assert own.errors(broad) == pytest.approx(0.9, abs=0.2)
    assert own.chances(broad, 3) == pytest.approx([0.65] * 3, abs=0.12)


def test_a_head_that_loses_its_way_is_known_by_depth() -> None:
    own, broad, rng, truth = Confidence(), Confidence(), random.Random(3), [0.95, 0.6, 0.2, 0.2]
    for _ in range(400):
        accepted = 0
        while accepted < 4 and rng.random() < truth[accepted]:
            accepted += 1
        own.add([1.0] * 4, accepted)
    assert own.chances(broad, 3) == pytest.approx(truth[:3], abs=0.15)
    assert own.chances(broad, 8)[4:] == pytest.approx([own.chances(broad, 4)[3]] * 4, abs=0.35)


def test_depths_never_tried_are_taken_for_the_one_before() -> None:
    broad = Confidence()
    for _ in range(60):
        broad.add([1.0], 1)
    assert Confidence().chances(broad, 3) == pytest.approx([0.98] * 3, abs=0.03)


def test_what_comes_after_forgetting_counts_for_more() -> None:
    own, broad = Confidence(), Confidence()
    for _ in range(200):
        for one in (own, broad):
            one.add([1.0], 0)
    assert own.chances(broad, 1)[0] < 0.1
    for one in (own, broad):
        one.forget()
    assert own.chances(broad, 1)[0] > 0.3
    for _ in range(8):
        for one in (own, broad):
            one.add([1.0], 1)
    assert own.chances(broad, 1)[0] > 0.7


def test_a_head_that_is_too_modest_is_trusted_more_than_it_says() -> None:
    own, broad = Confidence(), Confidence()
    for _ in range(60):
        own.add([0.1, 0.1], 2)
    assert 1 - own.errors(broad) * doubt(0.1) > 0.98


def test_a_head_that_is_always_right_is_believed_however_its_doubts_vary() -> None:
    """Or long drafts would end early for nothing."""
    own, broad, rng = Confidence(), Confidence(), random.Random(4)
    for _ in range(12):
        own.add([rng.uniform(0.7, 1) for _ in range(5)], 5)
    promised = 1.0
    for _ in range(16):
        promised *= 1 - own.errors(broad) * doubt(rng.uniform(0.7, 1))
    assert promised > 0.85
