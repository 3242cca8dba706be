"""Progress without a terminal, and the format of quantities."""

import io

import pytest

from qwen_serve.convert.progress import BYTES, Progress, duration, quantity, size


def test_plain_lines_with_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 20.0, 40.0])
    monkeypatch.setattr("qwen_serve.convert.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    with Progress("Writing x", 4_000_000, BYTES, stream) as bar:
        bar.advance(500_000)
        bar.advance(500_000)
        bar.note("last tensor")
    assert stream.getvalue().splitlines() == [
        "Writing x: 4 MB",
        "Writing x: 1 MB of 4 MB, 50 kB/s, 1 min 0 s left",
        "Writing x: done, 1 MB in 40.0 s (last tensor)",
    ]


def test_no_remaining_time_before_there_is_a_rate_and_then_the_recent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 10.0, 20.0, 30.0, 40.0, 50.0])
    monkeypatch.setattr("qwen_serve.convert.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    with Progress("Writing", 1000, "tokens", stream) as bar:
        for count in (1, 99, 100, 100):
            bar.advance(count)
    assert stream.getvalue().splitlines()[1:-1] == [
        "Writing: 1 of 1,000 tokens",
        "Writing: 100 of 1,000 tokens, 5 tokens/s, 3 min 0 s left",
        "Writing: 200 of 1,000 tokens, 6.67 tokens/s, 2 min 0 s left",
        "Writing: 300 of 1,000 tokens, 9.97 tokens/s, 1 min 10 s left",
    ]


def test_an_interrupt_at_the_first_line_is_told_too() -> None:
    class Interrupting(io.StringIO):
        def flush(self) -> None:
            if self.getvalue().count("\n") == 1:
                raise KeyboardInterrupt

    stream = Interrupting()
    with pytest.raises(KeyboardInterrupt), Progress("Reading", 10, "chunks", stream):
        pytest.fail("it was interrupted before")
    assert stream.getvalue().splitlines() == ["Reading: 10 chunks", "Reading: stopped after 0 chunks"]


def test_an_interrupted_run_says_how_far_it_came() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress("Reading", 10, "chunks", stream) as bar:
        bar.advance(4)
        raise KeyboardInterrupt
    assert stream.getvalue().splitlines()[-1] == "Reading: stopped after 4 chunks"


def test_a_terminal_gets_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress("Reading", 10, "chunks", stream) as bar:
        bar.advance(10)
    assert "Reading: 100%" in stream.getvalue()


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (999, "999 B"), (14_058_688, "14.1 MB"), (8.42e9, "8.42 GB"), (2e12, "2 TB")]
)
def test_sizes(n: float, text: str) -> None:
    assert size(n) == text
    assert quantity(n, BYTES) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.24, "4.2 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (float("inf"), "unknown time")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
