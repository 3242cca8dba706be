"""Fields about single tokens, and the tokens of a text."""

from typing import Any

import pytest

from qwen_serve.server.api.fields.sampling import spellings
from tests.server.api.conftest import Start
from tests.server.api.fakes import FakeVocab


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logit_bias": {"5": -100, "7": 2.5}}, {"logit_bias": ((5, -100.0), (7, 2.5))}),
        ({"logit_bias": [[5, 1.5], ["6", False]]}, {"logit_bias": ((5, 1.5), (6, float("-inf")))}),
        ({"logit_bias": {}}, {"logit_bias": ()}),
        ({"logit_bias": None}, {"logit_bias": ()}),
        ({"allowed_token_ids": [97, 98]}, {"allowed_token_ids": (97, 98)}),
        ({"bad_words": ["ab", " c"]}, {"bad_words": ((97, 98), (32, 99), (99,))}),
        ({"stop_token_ids": [97]}, {"stop_token_ids": frozenset({97}), "include_stop": False}),
        (
            {"stop_token_ids": [97], "include_stop_str_in_output": True},
            {"stop_token_ids": frozenset({97}), "include_stop": True},
        ),
        ({"min_tokens": 3}, {"min_tokens": 3}),
    ],
)
def test_they_reach_the_engine(start_shared: Start, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    server = start_shared("x")
    assert server.chat(**fields).status_code == 200
    params = server.engine.submissions[-1].params
    assert {name: getattr(params, name) for name in expected} == expected


class SpacedVocab(FakeVocab):
    """A space and the word behind it are one token."""

    def tokenize(self, text: str, *, special: bool, check: Any = None) -> list[int]:
        if text.startswith(" ") and len(text) > 1:
            return [ord(text[1]) - 32, *super().tokenize(text[2:], special=special)]
        return super().tokenize(text, special=special)


def test_spellings_of_a_word() -> None:
    vocab: Any = SpacedVocab()
    assert spellings("ab", vocab) == [(97, 98), (65, 98)]
    assert spellings(" ab", vocab) == [(65, 98), (97, 98)]
    assert spellings(" ", vocab) == [(32,)]
    assert spellings("<|im_end|>", vocab) == [(258,)]


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, ""), (2, "abcd"), (5, "abcd"), (6, "abcdabcd")]
)
def test_no_stop_string_before_there_are_enough_tokens(
    start_shared: Start, min_tokens: int, text: str
) -> None:
    server = start_shared("abcdabcd")
    answer = server.post("/v1/completions", prompt="x", stop="ab", min_tokens=min_tokens).json()
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["completion_tokens"] == len(text)


def test_control_tokens_are_spelled_out(start: Start) -> None:
    server = start(lambda _: [97, 257, 98])
    assert server.post("/v1/completions", prompt="x").json()["choices"][0]["text"] == "ab"
    spelled = server.post("/v1/completions", prompt="x", skip_special_tokens=False).json()
    assert spelled["choices"][0]["text"] == "a<|im_start|>b"


@pytest.mark.parametrize(("keep", "text"), [(3, "efg"), (7, "abcdefg"), (99, "abcdefg"), (-1, "abcdefg")])
def test_the_end_of_a_prompt(start_shared: Start, keep: int, text: str) -> None:
    server = start_shared("x")
    body = {"prompt": "abcdefg", "truncate_prompt_tokens": keep, "echo": True}
    assert server.post("/v1/completions", **body).json()["choices"][0]["text"] == text + "x"
    assert server.engine.submissions[-1].text == text
    long = start_shared("x", context_size=100)
    assert long.post("/v1/completions", prompt="a" * 200, max_tokens=10).status_code == 400
    kept = long.post("/v1/completions", prompt="a" * 200, max_tokens=10, truncate_prompt_tokens=-1)
    assert kept.status_code == 200
    assert len(long.engine.submissions[-1].prompt) == 90
    server.chat(truncate_prompt_tokens=2)
    assert len(server.engine.submissions[-1].prompt) == 2


def test_as_many_as_are_returned(start: Start) -> None:
    server = start("x")
    assert server.chat(n=2, best_of=2).status_code == 200
    assert server.chat(best_of=1).status_code == 200
    assert server.chat(n=2, best_of=1).status_code == 400
