"""Step times: what was measured comes back, values between are interpolated, and noise does not persist."""

import numpy as np
import pytest

from qwen_serve.server.engine.speculation.times import WINDOW, Mean, StepTimes


def card(rows: float) -> float:
    """A simulated GPU: 3 ms for the weights, 0.1 ms for each row, and a jump at nine rows."""
    return 3e-3 + 1e-4 * rows + (1e-3 if rows > 8 else 0)


@pytest.fixture
def times() -> StepTimes:
    times = StepTimes()
    for length in (1, 2, 4, 8, 9, 16, 64):
        times.add(1, length, card(length))
    return times


def of(times: StepTimes, *rows: int) -> list[float]:
    """Of one sequence."""
    return [times.of(1, n) for n in rows]


def test_measured_points_come_back_and_lines_join_them(times: StepTimes) -> None:
    assert of(times, 1, 8, 9, 64) == pytest.approx([card(1), card(8), card(9), card(64)])
    assert times.of(1, 32) == pytest.approx(card(32))


def test_a_lucky_measurement_is_evened_out(times: StepTimes) -> None:
    times.add(1, 32, card(1))
    assert times.of(1, 32) == pytest.approx(card(16)), "no less than fewer rows"
    assert (np.diff(of(times, *range(1, 300))) >= 0).all()


def test_past_the_last_point_it_goes_on(times: StepTimes) -> None:
    slope = (card(64) - card(8)) / 56
    for rows in (256, 2048):
        assert times.of(1, rows) == pytest.approx(card(64) + (rows - 64) * slope, rel=0.05)


def test_several_sequences_are_taken_for_as_many_rows_until_they_are_measured(times: StepTimes) -> None:
    assert times.of(4, 8) == pytest.approx(card(8))
    times.add(4, 1, 2 * card(4))
    assert times.of(4, 4) == pytest.approx(2 * card(4))
    assert times.of(4, 8) == pytest.approx(2 * card(8))
    times.add(4, 2, 3 * card(8))
    assert times.of(4, 8) == pytest.approx(3 * card(8))


def test_two_points_are_a_line() -> None:
    times = StepTimes()
    for n, seconds in ((1, 2e-3), (8, 4e-3)):
        times.add(n, 1, seconds)
        times.add(n, 5, 2 * seconds)
    assert times.of(8, 24) == pytest.approx(6e-3)
    assert times.of(8, 72) == pytest.approx(12e-3)
    assert 2e-3 < times.plain(4) < 4e-3


def test_before_anything_is_known_more_rows_cost_more() -> None:
    assert (np.diff(of(StepTimes(), *range(1, 100))) > 0).all()


def test_a_mean_forgets_and_limits_what_is_late() -> None:
    mean = Mean()
    for _ in range(WINDOW):
        mean.add(1.0)
    mean.add(1000.0)
    assert mean.value < 1.1, "one late step"
    for _ in range(4 * WINDOW):
        mean.add(100.0)
    assert mean.value > 50, "the machine has become slow"
    for _ in range(8 * WINDOW):
        mean.add(2.0)
    assert mean.value == pytest.approx(2, rel=0.1)


def test_results_that_are_collected_in_pairs_have_their_mean(times: StepTimes) -> None:
    for step in range(200):
        times.took(1, "", 0, 0.0 if step % 2 else 2.6 * card(1), card(1))
        assert times.plain(1) == pytest.approx(1.3 * card(1), rel=0.35)
    assert times.plain(1) == pytest.approx(1.3 * card(1), rel=0.05)


def test_rounds_are_known_by_load_drafter_and_depth(times: StepTimes) -> None:
    assumed = times.factor(8, "mtp", 4)
    for _ in range(40):
        times.took(8, "mtp", 4, 1.5, 1.0)
    assert times.factor(8, "mtp", 4) == pytest.approx(1.5, rel=0.05)
    assert times.factor(7, "mtp", 6) == times.factor(8, "mtp", 4), "the nearest one that is known"
    assert times.factor(8, "dflash", 4) == assumed


def test_a_start_that_was_held_up_is_made_good(times: StepTimes) -> None:
    """Where drafts pay, no plain step is measured."""
    for _ in range(40):
        times.took(1, "mtp", 4, 0.3, 1.0)
    assert times.plain(1) == pytest.approx(0.3 * card(1), rel=0.1)
    for _ in range(40):
        times.took(1, "", 0, card(1), card(1))
    assert times.plain(1) == pytest.approx(card(1), rel=0.1)


def test_each_distinct_number_of_rows_is_a_pass(times: StepTimes) -> None:
    assert times.passes([4, 4]) == pytest.approx(times.of(2, 8))
    assert times.passes([1, 4, 9]) == pytest.approx(times.of(3, 3) + times.of(2, 6) + times.of(1, 5))
    ragged = StepTimes(ragged=True)
    ragged.take(times.known)
    assert ragged.passes([1, 4, 9, 2]) == pytest.approx(card(16))


def test_the_next_start_has_what_was_known(times: StepTimes) -> None:
    times.add(4, 2, 1.5 * card(8))
    after = StepTimes()
    after.take(times.known)
    assert after.known == times.known
    assert after.of(4, 8) == times.of(4, 8)


def test_a_warm_up_measures_plain_steps_behind_each_other_and_what_a_change_costs() -> None:
    times, last, now = StepTimes(), (0, 0), [0.0]

    def step(n: int, rows: int) -> float:
        nonlocal last
        spent = card(n * rows) + (0.0 if last == (n, rows) else 2e-3)
        last, now[0] = (n, rows), now[0] + spent
        return spent

    times.rehearse(
        step,
        lambda n: 0.9 * card(n),
        lambda n, rows: n * rows <= 64,
        seconds=10.0,
        clock=lambda: now[0],
        prompt=(128, 0.5),
    )
    assert times.known.change == pytest.approx(2e-3)
    assert times.plain(8) == pytest.approx(0.9 * card(8))
    assert times.of(8, 40) == pytest.approx(card(40))
    assert times.of(1, 128) == pytest.approx(0.5)
