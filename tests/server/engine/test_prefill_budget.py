"""The number of prompt tokens in a step, from a time limit and the fastest measured rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_serve.server.engine.prefill_budget import MIN_PREFILL, PrefillBudget


def started(seconds: float, each: float, ubatch: int, most: int, fixed: int = 0) -> PrefillBudget:
    """As a start leaves it that found a token to take `each` seconds."""
    budget = PrefillBudget(seconds, ubatch, most, fixed=fixed)
    budget.start(each)
    return budget


@pytest.mark.parametrize(
    ("seconds", "each", "ubatch", "most", "tokens"),
    [
        (0.15, 0.15 / 7000, 2048, 8192, 3 * 2048),
        (0.15, 0.15 / 3100, 2048, 8192, 2 * 2048),
        (0.15, 0.15 / 3000, 2048, 8192, 2048),
        (0.15, 0.15 / 700, 2048, 8192, 700),
        (0.15, 1e-6, 2048, 8192, 8192),
        (0.75, 0.15 / 700, 512, 8192, 7 * 512),
        (0.15, 0.01, 512, 128, MIN_PREFILL),
        (0.15, 1.0, 512, 100, MIN_PREFILL),
        (0.15, 1.0, 512, 5, 5),
    ],
)
def test_a_step_reads_what_takes_about_so_long(
    seconds: float, each: float, ubatch: int, most: int, tokens: int
) -> None:
    assert started(seconds, each, ubatch, most).tokens == tokens


@pytest.mark.parametrize("milliseconds", [66, 70, 74, 78, 82])
def test_the_noise_of_a_quiet_card_decides_nothing(milliseconds: int) -> None:
    """Times of 2,048 tokens of the synthetic 4B on an H200, in several starts."""
    assert started(0.15, 1e-3 * milliseconds / 2048, 2048, 8192).tokens == 4096


@given(
    seconds=st.floats(0.001, 2),
    each=st.floats(1e-6, 0.2),
    ubatch=st.sampled_from([16, 64, 512, 2048]),
    passes=st.integers(1, 8),
    part=st.integers(0, 15),
)
def test_no_other_number_of_passes_is_nearer_by_its_own_measure(
    seconds: float, each: float, ubatch: int, passes: int, part: int
) -> None:
    """But for a few tokens that are read in any case. Below one pass, as many as fit."""
    most = ubatch * passes - part
    tokens = started(seconds, each, ubatch, most).tokens
    assert 0 < tokens <= most
    assert tokens < ubatch or not tokens % ubatch or tokens == most
    step = 1 if tokens < ubatch else ubatch / 2
    assert tokens + step > most or (tokens + step) * each > seconds * (1 - 1e-9), "more would have fitted"
    over = 0 if tokens < ubatch else ubatch / 2
    assert (tokens - over) * each <= seconds * (1 + 1e-9) or tokens in (min(MIN_PREFILL, most), ubatch)


def took(budget: PrefillBudget, tokens: int, seconds: float) -> None:
    """Record a step that was waited for."""
    budget.add(tokens, 100.0, 100.0 + seconds)


def test_a_start_beside_others_is_made_good_by_a_step_that_is_not_held_up() -> None:
    quiet, busy = 0.15 / 4096, 0.6 / 4096
    budget = started(0.15, busy, 2048, 8192)
    assert budget.tokens == 1024
    took(budget, 1023, 1023 * quiet)
    assert budget.tokens == 1024, "that step was not full"
    took(budget, 2048, 2048 * busy)
    assert budget.tokens == 1024
    took(budget, 1024, 1024 * busy / 2.1)
    assert budget.tokens == 2048, "beside running answers, too"
    took(budget, 2047, 2047 * quiet)
    assert budget.tokens == 2048
    took(budget, 4096, 4096 * quiet)
    assert budget.tokens == 4096
    assert budget.each == pytest.approx(quiet)
    for _ in range(100):
        took(budget, 4096, 4096 * busy)
    assert budget.tokens == 4096, "whatever the card does besides"


def test_what_nobody_waited_for_is_counted_with_what_somebody_did() -> None:
    """llama_decode returns long before the device has computed a prompt."""
    budget = started(1.0, 0.25, 16, 64)
    budget.add(16, 10.0, None)
    budget.add(16, 10.1, None)
    assert budget.each == 0.25
    budget.add(0, 10.2, 14.0)
    assert budget.each == 4.0 / 32
    budget.add(0, 14.0, 14.1)
    budget.add(15, 14.1, None)
    budget.add(0, 14.2, 14.3)
    budget.add(1, 14.3, 14.4)
    assert budget.each == 4.0 / 32, "these were too few"


def test_what_somebody_says_stays() -> None:
    budget = started(0.15, 1.0, 16, 64, fixed=7)
    took(budget, 64, 1e-6)
    assert budget.tokens == 7


def test_what_no_start_has_measured_is_not_learnt() -> None:
    """Where neither drafts nor the budget depend on it."""
    budget = PrefillBudget(0.15, 16, 64)
    took(budget, 64, 1e-6)
    assert (budget.tokens, budget.each) == (64, 0.0)
