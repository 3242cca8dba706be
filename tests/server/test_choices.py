"""Several answers to one prompt (`n`, `best_of`) are those of the same requests alone, with the seeds that
follow each other, streamed and whole, in company that leaves."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.marks import slow_but
from tests.server.serving import serving

N = 5
SEED = 40
DRAWN = {"temperature": 2.5, "seed": SEED, "max_tokens": 20, "ignore_eos": True}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "Tell me of the sea."}]}),
    "chat with log-probabilities": (
        CHAT,
        {"messages": [{"role": "user", "content": "And now?"}], "logprobs": True, "top_logprobs": 3},
    ),
    "text": (COMPLETIONS, {"prompt": "The sea"}),
    "text with log-probabilities": (COMPLETIONS, {"prompt": "The sea", "logprobs": 3, "top_k": 20}),
    "a grammar": (
        COMPLETIONS,
        {"prompt": "Two:", "grammar": 'root ::= [a-z]{3,9} "-" [0-9]{2,4}', "ignore_eos": False},
    ),
    "penalties": (COMPLETIONS, {"prompt": "a b a b a b", "presence_penalty": 0.8, "logit_bias": {"271": 3}}),
}


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Choices of an answer, in order, each without its index."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    assert [choice.pop("index") for choice in choices] == [*range(len(choices))]
    return choices


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def scores_of(choice: dict[str, Any]) -> list[Any]:
    """Each token's log-probabilities, in the words of either endpoint."""
    said = choice.get("logprobs") or {}
    if said.get("content"):
        return list(said["content"])
    return list(zip(said.get("tokens") or (), said.get("token_logprobs") or (), strict=True))


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[tuple[str, str, list[Any]]]:
    """Text, end and log-probabilities of each choice, from its events."""
    texts, ends, scores = [""] * N, [""] * N, [list[Any]() for _ in range(N)]
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    at = choice["index"]
                    texts[at] += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
                    ends[at] = choice.get("finish_reason") or ends[at]
                    scores[at] += scores_of(choice)
    return list(zip(texts, ends, scores, strict=True))


@pytest.fixture(scope="module", params=slow_but([{}], [{}, {"speculation": "both", "draft_always": True}]))
def url(request: pytest.FixtureRequest, nano_f32: Path) -> Iterator[str]:
    places = {
        "parallel": 12,
        "ctx_size": 12 * 512,
        "deterministic": True,
        "sampling": "device",
        "greedy": False,
    }
    with serving(nano_f32, **places, **request.param) as server:
        yield server.url


def test_each_is_the_one_of_its_seed(url: str) -> None:
    with httpx.Client(base_url=url, timeout=300) as http:
        alone = {
            name: [whole(http, path, {**DRAWN, **body, "seed": SEED + i})[0] for i in range(N)]
            for name, (path, body) in ASKED.items()
        }
        for name, found in alone.items():
            assert len({text_of(choice) for choice in found}) > 2, name

        def leave() -> None:
            path, body = ASKED["text"]
            with http.stream("POST", path, json={**DRAWN, **body, "n": 3, "stream": True}) as answer:
                next(answer.iter_lines())

        def check(name: str, fields: dict[str, Any]) -> None:
            path, body = ASKED[name]
            asked = {**DRAWN, **body, **fields}
            if fields.get("stream"):
                expected = [(text_of(one), one["finish_reason"], scores_of(one)) for one in alone[name]]
                assert streamed(http, path, asked) == expected, name
            else:
                assert whole(http, path, asked) == alone[name], name

        several: list[dict[str, Any]] = [{"n": N}, {"n": N, "best_of": N}, {"n": N, "stream": True}]
        with ThreadPoolExecutor(6) as pool:
            waiting = []
            for name in ASKED:
                waiting += [pool.submit(leave), *(pool.submit(check, name, fields) for fields in several)]
            for one in waiting:
                one.result()
