"""Tokens to text: characters and stop strings that extend over several tokens."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qwen_serve.server.chat import Detokenizer, StopStrings
from qwen_serve.server.engine import Vocab

fuzz = settings(max_examples=150, suppress_health_check=list(HealthCheck))


class Bytes:
    """A vocabulary whose tokens are the byte strings of a list."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


def detokenizer(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> Detokenizer:
    return Detokenizer(Bytes(pieces), StopStrings(stop) if stop else None)  # type: ignore[arg-type]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """The data, cut at these places (modulo its length). Pieces may be empty, like those of control
    tokens."""
    places = sorted(cut % (len(data) + 1) for cut in cuts)
    return [data[start:end] for start, end in pairwise([0, *places, len(data)])]


def run(pieces: list[bytes], stop: Sequence[str], batch: int) -> tuple[list[str], Detokenizer]:
    text = detokenizer(pieces, stop)
    deltas = [
        text.feed(range(start, min(start + batch, len(pieces)))) for start in range(0, len(pieces), batch)
    ]
    return [*deltas, text.flush()], text


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the first complete stop string; the longest counts if several end there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


cuts = st.lists(st.integers(0, 200), max_size=12)
batches = st.integers(1, 4)
short = st.text(alphabet="abé\n", max_size=14)
stops = st.lists(st.text(alphabet="abé\n", min_size=1, max_size=5), max_size=5)


@fuzz
@given(st.text(max_size=30), cuts, batches)
def test_characters_survive_any_cut(text: str, cuts: list[int], batch: int) -> None:
    pieces = split(text.encode(), cuts)
    deltas, result = run(pieces, [], batch)
    assert "".join(deltas) == text
    assert result.completion_tokens == len(pieces)


@fuzz
@given(st.binary(max_size=20), cuts, batches, stops)
def test_bytes_that_are_no_text_do_no_harm(
    data: bytes, cuts: list[int], batch: int, stops: list[str]
) -> None:
    whole = "".join(run([data], stops, 1)[0])
    assert "".join(run(split(data, cuts), stops, batch)[0]) == whole


@fuzz
@given(short, cuts, batches, stops)
@example("aab", [1, 2], 1, ["ab"])
@example("abab\n", [1, 2, 3], 1, ["abab\n", "ba"])
def test_stop_strings(text: str, cuts: list[int], batch: int, stops: list[str]) -> None:
    deltas, result = run(split(text.encode(), cuts), stops, batch)
    expected = first_stop(text, stops)
    assert (result.stop_string is not None) == (expected is not None)
    assert "".join(deltas) == (text if expected is None else expected)


@fuzz
@given(short, cuts, stops)
def test_nothing_is_held_without_need(text: str, cuts: list[int], stops: list[str]) -> None:
    """All text is released except for the longest end that may still become a stop string."""
    pieces = split(text.encode(), cuts)
    result = detokenizer(pieces, stops)
    released, arrived = "", b""
    for token, piece in enumerate(pieces):
        released += result.feed([token])
        arrived += piece
        if result.stop_string is not None:
            return
        whole = arrived.decode(errors="ignore")
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
        held = max((len(start) for start in beginnings if whole.endswith(start)), default=0)
        assert released == whole[: len(whole) - held]


@fuzz
@given(short, cuts, batches, stops)
def test_tokens_are_those_of_the_returned_text(
    text: str, cuts: list[int], batch: int, stops: list[str]
) -> None:
    pieces = [piece for piece in split(text.encode(), cuts) if piece]
    deltas, result = run(pieces, stops, batch)
    if result.stop_string is None:
        assert result.completion_tokens == len(pieces)
        return
    length = len("".join(deltas).encode())
    before = sum(len(b"".join(pieces[:index])) < length for index in range(len(pieces)))
    assert result.completion_tokens == before


def test_an_unfinished_character_at_the_end_is_left_out() -> None:
    deltas, result = run([b"a", "€".encode()[:2]], [], 1)
    assert deltas == ["a", "", ""]
    assert result.completion_tokens == 2


def test_what_follows_a_stop_is_ignored() -> None:
    pieces = [b"one ", b"END", b" two"]
    result = detokenizer(pieces, ["END"])
    assert result.feed([0, 1, 2]) == "one "
    assert (result.stop_string, result.completion_tokens) == ("END", 1)
    assert result.feed([2]) + result.flush() == ""
    assert result.completion_tokens == 1


def test_a_token_that_also_carries_text_before_the_stop_counts() -> None:
    deltas, result = run([b"on", b"e\n\n", b"Q:"], ["\n\nQ:"], 1)
    assert deltas == ["on", "e", "", ""]
    assert result.completion_tokens == 2


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        detokenizer([], ["a", ""])


@pytest.mark.parametrize("text", ["Zürich, 東京 und 🦙!", "<think>\nHm.\n</think>\n\nYes.<tool_call>"])
def test_a_real_vocabulary(vocab: Vocab, text: str) -> None:
    result = Detokenizer(vocab)
    tokens = vocab.tokenize(text, special=True)
    assert "".join(result.feed([token]) for token in tokens) + result.flush() == text
    assert result.completion_tokens == len(tokens)


def test_control_tokens_are_not_shown(vocab: Vocab) -> None:
    tokens: list[Any] = vocab.tokenize("a<|vision_start|>b", special=True)
    assert Detokenizer(vocab).feed(tokens) == "ab"


def test_texts_share_stop_strings() -> None:
    stops = StopStrings(["END"])
    one, other = (Detokenizer(Bytes([b"E", b"ND", b"x"]), stops) for _ in range(2))  # type: ignore[arg-type]
    assert one.feed([0]) == ""
    assert other.feed([2]) == "x"
    assert one.feed([1]) == ""
    assert (one.stop_string, other.stop_string) == ("END", None)
