"""Tokenization from cached pieces equals llama.cpp's of the whole text."""

import os
from random import Random
from time import process_time
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_serve.llamacpp import Model
from qwen_serve.server.engine import InvalidPrompt
from qwen_serve.server.engine.vocab import BLOCK, LONG, LONGEST_WORD, TURN_START, Vocab

UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
ODD = [
    "\n",
    "\n\n",
    " ",
    "   ",
    "<|im_",
    "im_start|>",
    "<",
    "|>",
    "é",
    "🌍",
    "\u3000",
    "'s",
    "12",
    "user",
    "\t",
]


@pytest.fixture(scope="module")
def vocab(model: Model) -> Vocab:
    return Vocab(model, 2**20)


def words(seed: int, count: int) -> str:
    random = Random(seed)
    return " ".join("".join(random.choices("abcdefgh", k=random.randint(1, 8))) for _ in range(count))


@settings(max_examples=60, suppress_health_check=UNCHECKED)
@given(data=st.data())
def test_a_text_in_turns_has_the_ids_of_the_whole(model: Model, vocab: Vocab, data: st.DataObject) -> None:
    odd = st.sampled_from([*ODD, *vocab.added_tokens, TURN_START.decode()])
    long = st.integers(0, 3).map(lambda seed: words(seed, LONG // 4))  # few, so that they are met again
    text = "".join(data.draw(st.lists(odd | odd | long, max_size=12)))
    assert vocab.tokenize(text, special=True) == model.tokenize(text.encode(), special=True)


@pytest.mark.parametrize("special", [True, False])
def test_text_is_composed_as_qwens_tokenizer_does(vocab: Vocab, special: bool) -> None:
    """tokenizer.json normalizes to NFC, which llama.cpp does not."""
    text = "Ångström, über, déjà vu, 한국어 <|im_end|>"
    apart = normalize("NFD", text)
    assert apart != text
    assert vocab.tokenize(apart, special=special) == vocab.tokenize(text, special=special)


def test_what_was_tokenised_once_is_cached(
    model: Model, vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [f"<|im_start|>user\n{words(seed, LONG)}<|im_end|>\n" for seed in (10, 11)]
    first = vocab.tokenize("".join(turns), special=True)
    asked: list[bytes] = []
    tokenize = model.tokenize

    def counted(text: bytes, *, special: bool) -> list[int]:
        asked.append(text)
        return tokenize(text, special=special)

    monkeypatch.setattr(model, "tokenize", counted)
    end = "<|im_start|>assistant\n"
    longer = vocab.tokenize("".join(turns) + end, special=True)
    assert asked == [end.encode()]
    assert longer[: len(first)] == first
    longer.clear()  # the caller's own
    assert vocab.tokenize("".join(turns), special=True) == first
    assert asked == [end.encode()]


def test_control_tokens_stay_text_where_they_are_not_asked_for(model: Model, vocab: Vocab) -> None:
    text = f"<|im_start|>user\n{words(12, LONG)}"
    vocab.tokenize(text, special=True)
    assert vocab.tokenize(text, special=False) == model.tokenize(text.encode(), special=False)


def test_lone_surrogates_in_a_long_text(vocab: Vocab) -> None:
    text = words(13, LONG)
    assert vocab.tokenize(text + "\ud800", special=True) == vocab.tokenize(text + "?", special=True)


@pytest.fixture
def parsed(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the texts that llama.cpp tokenizes."""
    seen: list[str] = []
    tokenize = model.tokenize

    def watched(text: bytes, **options: Any) -> list[int]:
        seen.append(text.decode())
        return tokenize(text, **options)

    monkeypatch.setattr(model, "tokenize", watched)
    return seen


def test_the_least_recently_used_is_forgotten_first(model: Model, parsed: list[str]) -> None:
    texts = [words(seed, LONG) for seed in range(3)]
    longest = max(len(model.tokenize(text.encode(), special=True)) for text in texts)
    vocab = Vocab(model, 2 * longest)
    for index in (0, 1, 0, 2):
        vocab.tokenize(texts[index], special=True)
    parsed.clear()
    for index in (0, 2, 1):
        vocab.tokenize(texts[index], special=True)
    assert "".join(parsed) == texts[1]


def test_more_than_the_limit_is_not_kept(model: Model, parsed: list[str]) -> None:
    vocab = Vocab(model, 3)
    for _ in range(2):
        assert vocab.tokenize(words(1, LONG), special=True)
    assert "".join(parsed) == 2 * words(1, LONG)


NEAR = [
    "a",
    "é",
    "я",
    "中",
    "あ",
    "한",
    "7",
    "²",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    ".",
    "'",
    "'s",
    "!",
    "。",
    "_",
    "@",
    "\u0301",
]


@settings(max_examples=80, suppress_health_check=UNCHECKED)
@given(data=st.data(), special=st.booleans(), seed=st.integers(0, 2**32))
def test_a_text_in_blocks_has_the_ids_of_the_whole(
    model: Model, vocab: Vocab, data: st.DataObject, special: bool, seed: int
) -> None:
    """The cut after BLOCK characters is placed within all kinds of text."""
    odd = st.sampled_from([*NEAR, *ODD, *vocab.added_tokens, "<|im", "end|>"]) | st.characters(codec="utf-8")
    around = data.draw(st.lists(odd, min_size=1, max_size=30))
    before = words(seed, BLOCK)[: BLOCK - data.draw(st.integers(0, 40))]
    text = before + "".join(around) + words(seed + 1, 20)
    whole = normalize("NFC", text).encode()
    assert vocab.tokenize(text, special=special) == model.tokenize(whole, special=special)


def test_random_texts_have_the_ids_of_the_whole(
    model: Model, vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_serve.server.engine.vocab.BLOCK", 8)  # so that there are many cuts
    random = Random(1)
    for _ in range(int(os.environ.get("FUZZ_CASES", "20"))):
        text = "".join(random.choices([*NEAR, *ODD, *vocab.added_tokens, "word", "Ünter"], k=1000))
        for special in (False, True):
            whole = normalize("NFC", text).encode()
            assert vocab.tokenize(text, special=special) == model.tokenize(whole, special=special)


@pytest.mark.parametrize(
    "text",
    [
        "<|im_end|>a" * 100_000,
        "<|im_start|>" * 50_000,
        "<think>1" * 100_000,
        "a" * LONGEST_WORD,
        " \n" * 30_000,
    ],
    ids=["ends", "starts", "tags", "word", "lines"],
)
@pytest.mark.parametrize("special", [True, False])
def test_no_text_takes_long(vocab: Vocab, text: str, special: bool) -> None:
    """CPU time. llama.cpp takes minutes for the first in one piece, and four times that for twice as much."""
    began = process_time()
    vocab.tokenize(text, special=special)
    assert process_time() - began < 3


def test_a_word_without_end_is_refused(vocab: Vocab) -> None:
    with pytest.raises(InvalidPrompt, match="262,144 characters"):
        vocab.tokenize("x" * (LONGEST_WORD + 1), special=True)


@pytest.mark.parametrize("special", [True, False])
def test_work_ends_when_its_check_says_so(vocab: Vocab, special: bool) -> None:
    seen: list[int] = []

    def check(count: int) -> None:
        seen.append(count)
        if sum(seen) > 5000:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        vocab.tokenize("a b c " * 2**20, special=special, check=check)
    assert 5000 < sum(seen) < 5000 + BLOCK


def test_remembered_ids_are_counted_too(vocab: Vocab) -> None:
    text = words(21, LONG)
    for _ in range(2):
        seen: list[int] = []
        ids = vocab.tokenize(text, special=True, check=seen.append)
        assert sum(seen) == len(ids)
