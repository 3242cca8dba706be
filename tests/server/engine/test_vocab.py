"""Text to ids: what is remembered and put together is what llama.cpp makes of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.engine.llama import Model
from server.engine.tokenizer_cache import TokenizerCache
from server.engine.vocab import LONG, TURN_START, Vocab, _stands_alone

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
def model(nano_f32: Path) -> Iterator[Model]:
    model = Model(nano_f32, n_gpu_layers=0)
    yield model
    model.close()


@pytest.fixture(scope="module")
def vocab(model: Model) -> Vocab:
    return Vocab(model, 2**20)


def words(seed: int, count: int) -> str:
    random = Random(seed)
    return " ".join("".join(random.choices("abcdefgh", k=random.randint(1, 8))) for _ in range(count))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_text_in_turns_has_the_ids_of_the_whole(model: Model, vocab: Vocab, data: st.DataObject) -> None:
    odd = st.sampled_from([*ODD, *vocab.added_tokens, TURN_START.decode()])
    long = st.integers(0, 3).map(lambda seed: words(seed, LONG // 4))  # few, so that they are met again
    text = "".join(data.draw(st.lists(odd | odd | long, max_size=12)))
    assert vocab.tokenize(text, special=True) == model.tokenize(text.encode(), special=True)


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


@pytest.mark.parametrize(
    ("others", "alone"),
    [
        ([b"<|im_end|>", b"<think>", b""], True),
        ([b"|>"], False),
        ([b"x<"], False),
        ([b"<|im_start|>user"], False),
        ([b">>"], False),
    ],
)
def test_what_may_be_cut_at(others: list[bytes], alone: bool) -> None:
    assert _stands_alone(TURN_START, [TURN_START, *others]) is alone
    assert not _stands_alone(TURN_START, others)


def test_the_least_recently_used_is_forgotten_first() -> None:
    asked: list[str] = []

    def tokenize(text: str) -> list[int]:
        asked.append(text)
        return list(map(ord, text))

    memory = TokenizerCache(limit=10)
    for text in ("aaaa", "bbbb", "aaaa", "cccc"):
        assert memory.ids(text, tokenize) == list(map(ord, text))
    assert (len(memory), memory.tokens) == (2, 8)
    memory.ids("aaaa", tokenize)
    assert asked == ["aaaa", "bbbb", "cccc"]
    memory.ids("bbbb", tokenize)
    assert asked.pop() == "bbbb"


def test_more_than_the_limit_is_not_kept() -> None:
    memory = TokenizerCache(limit=3)
    assert memory.ids("abcd", lambda text: list(map(ord, text))) == [97, 98, 99, 100]
    assert (len(memory), memory.tokens) == (0, 0)
