"""Step times: measured values are returned, values between them are interpolated, and noise does not
persist."""

import numpy as np
import pytest

from qwen_serve.server.engine.speculation.times import FIRST, Mean, StepTimes


def card(rows: float) -> float:
    """A simulated GPU: 3 ms for the weights, 0.1 ms for each row, and a jump at nine rows."""
    return 3e-3 + 1e-4 * rows + (1e-3 if rows > 8 else 0)


def of(times: StepTimes, *rows: int) -> list[float]:
    """Of one sequence."""
    return [times.of(1, n) for n in rows]


@pytest.fixture
def times() -> StepTimes:
    times = StepTimes()
    for length in (1, 2, 4, 8, 9, 16, 64):
        times.add(1, length, card(length))
    return times


def test_measured_points_come_back_and_lines_join_them(times: StepTimes) -> None:
    assert of(times, 1, 8, 9, 64) == pytest.approx([card(1), card(8), card(9), card(64)])
    assert times.of(1, 32) == pytest.approx(card(32))


def test_a_lucky_measurement_is_evened_out(times: StepTimes) -> None:
    times.add(1, 32, card(1))
    assert times.of(1, 32) == pytest.approx(card(16)), "no less than fewer rows"
    assert of(times, 1, 4, 64) == pytest.approx([card(1), card(4), card(64)])
    assert (np.diff(of(times, *range(1, 300))) >= 0).all()


def test_past_the_last_point_it_goes_on(times: StepTimes) -> None:
    slope = (card(64) - card(8)) / 56
    assert times.of(1, 256) == pytest.approx(card(64) + 192 * slope)


def test_several_sequences_are_taken_for_as_many_rows_until_they_are_measured(times: StepTimes) -> None:
    assert times.of(4, 2) == pytest.approx(card(8))
    times.add(4, 1, 2 * card(4))
    assert times.of(4, 1) == pytest.approx(2 * card(4))
    assert times.of(4, 2) == pytest.approx(2 * card(8))
    assert times.of(3, 1) == pytest.approx(2 * card(3))
    assert times.of(2, 1) == pytest.approx(card(2))


def test_two_measurements_are_a_line() -> None:
    times = StepTimes()
    for rows in (1, 2):
        times.add(1, rows, card(rows))
    assert of(times, 1, 2, 9) == pytest.approx([card(1), card(2), card(2) + 7e-4])


def test_before_anything_is_known_more_rows_cost_more() -> None:
    guessed = of(StepTimes(), *range(1, 100))
    assert (np.diff(guessed) > 0).all()


def test_a_mean_takes_the_least_at_first_and_then_follows() -> None:
    mean = Mean()
    for value in (9.0, 1.0, *[5.0] * (FIRST - 2)):
        mean.add(value)
    assert mean.value == 1
    mean.add(1000.0)
    assert mean.value < 1.06, "one late step"
    mean.add(1.0)
    for _ in range(20):
        mean.add(100.0)
    assert mean.value > 50, "the machine has become slow"
    for _ in range(100):
        mean.add(2.0)
    assert mean.value == pytest.approx(2, rel=0.01)
    for _ in range(100):
        mean.add(0.5)
    assert mean.value == pytest.approx(0.5, rel=0.01)


def test_answers_follow_small_changes_in_the_end(times: StepTimes) -> None:
    for n in range(400):
        times.add(1, 8, card(8) * (1 + n / 2000))
    assert times.of(1, 8) == pytest.approx(1.2 * card(8), rel=0.02)


def test_each_distinct_number_of_rows_is_a_pass(times: StepTimes) -> None:
    assert times.passes([4, 4]) == pytest.approx(times.of(2, 4))
    assert times.passes([1, 4, 9]) == pytest.approx(times.of(3, 1) + times.of(2, 3) + times.of(1, 5))


def test_what_builds_a_graph_is_booked_apart(times: StepTimes) -> None:
    for _ in range(20):
        times.add(1, 8, card(8) + 3e-3, built=True)
        times.add(4, 2, card(8) + 3e-3, built=True)
    assert times.of(1, 8) == pytest.approx(card(8))
    assert times.building.value == pytest.approx(3e-3)
    assert times.of(4, 2) == pytest.approx(card(8)), "by then it is known what building takes"
    times.add(4, 2, card(8))
    assert times.of(4, 2) == pytest.approx(card(8))


def test_a_graph_that_was_late_once_is_not_dear_for_ever(times: StepTimes) -> None:
    times.add(1, 8, card(8) + 0.5, built=True)
    for _ in range(4):
        times.add(1, 8, card(8) + 3e-3, built=True)
    assert times.building.value == pytest.approx(3e-3)


def test_plain_steps_correct_a_start_that_was_held_up() -> None:
    times = StepTimes()
    for _ in range(FIRST):
        for rows in (1, 2, 4, 8, 16):
            times.add(1, rows, 3 * card(rows))
        times.add(4, 1, 3 * card(4))
        times.add(4, 2, 3 * 1.5 * card(8))
    for _ in range(100):
        times.add(1, 1, card(1))
        times.add(4, 1, card(4))
    assert of(times, 1, 2, 8) == pytest.approx([card(1), card(2), card(8)], rel=0.02)
    assert times.of(4, 2) == pytest.approx(1.5 * card(8), rel=0.02)


def test_the_next_start_has_what_was_known(times: StepTimes) -> None:
    times.add(4, 2, 1.5 * card(8))
    after = StepTimes()
    after.take(times.dump())
    assert after.dump() == times.dump()
    assert after.of(4, 2) == times.of(4, 2)


def test_a_ragged_pass_costs_what_its_rows_cost(times: StepTimes) -> None:
    lengths = [1, 4, 9, 2]
    ragged = StepTimes(ragged=True)
    ragged.take(times.dump())
    assert ragged.passes(lengths) == pytest.approx(card(16))
    assert ragged.passes(lengths) < times.passes(lengths)
    ragged.add(4, 1, card(4))
    ragged.add(4, sum(lengths) / 4, 2 * card(16))
    assert ragged.passes([4, 4, 4, 4]) == pytest.approx(2 * card(16))
    assert ragged.passes([1] * 4) == pytest.approx(card(4))
    ragged.add(16, 17 / 16, 9.0)
    assert ragged.passes([1] * 16) == pytest.approx(card(16)), "a row more is no plain step"
