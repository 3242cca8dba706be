"""A server with several API keys: a key with many requests does not delay others."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.marks import slow_but
from tests.server.serving import EXACT, served
from tests.waiting import wait_until

PATH = "/v1/completions"
LONG = 500
"""Tokens of answers that are still written when all that is asked for meanwhile has been."""


def body(prompt: str, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0, **fields}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def ask(http: httpx.Client, name: str, **fields: Any) -> str:
    answer = http.post(PATH, json=body(**fields), headers=key(name))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("policy", slow_but(["fair"], ["priority", "fair"]))
def test_a_short_request_is_answered_before_another_key_s_long_ones(
    nano_f32: Path, tmp_path: Path, policy: str
) -> None:
    """While one of them still streams; and all of them answer as alone."""
    (tmp_path / "keys").write_text("bulk class=flex\neditor\n")
    arguments = ("--model", nano_f32, "--parallel", "2", "--ctx-size", "8192", "--speculation", "off", *EXACT)
    keys = ("--scheduling-policy", policy, "--api-key-file", tmp_path / "keys")
    prompts = [f"Number {number}. Once upon a time" for number in range(4)]
    with served(*arguments, *keys) as http, ThreadPoolExecutor(len(prompts)) as pool:
        alone = [ask(http, "bulk", prompt=prompt, tokens=LONG) for prompt in prompts]
        short = ask(http, "editor", prompt="Hello", tokens=8)
        stream = body(prompts[0], LONG, stream=True, cache_prompt=False)
        with http.stream("POST", PATH, json=stream, headers=key("bulk")) as answer:
            lines = answer.iter_lines()
            pieces = [json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]]
            others = [
                pool.submit(ask, http, "bulk", prompt=prompt, tokens=LONG, cache_prompt=False)
                for prompt in prompts[1:]
            ]
            wait_until(lambda: "qwen_waiting_sequences 2.0" in http.get("/metrics").text)
            assert ask(http, "editor", prompt="Hello", tokens=8) == short
            assert not any(other.done() for other in others), "they came first"
            for line in lines:
                if line.startswith("data: {"):
                    pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
        assert ["".join(pieces), *(other.result() for other in others)] == alone
        metrics = http.get("/metrics").text
    served_cost = [line for line in metrics.splitlines() if line.startswith("qwen_served_cost_total")]
    costs = {line.split('"')[1]: float(line.split()[-1]) for line in served_cost}
    assert costs["flex"] > costs["default"] > costs["priority"] == 0.0


REPEATED = "Once upon a time there was a mill by the sea, and the miller said"
SEEN = ("draft_n", "draft_n_accepted", "cached_tokens", "prompt_n", "cache_n", "predicted_n")
"""What an answer tells of drafts and of the prefix cache."""


def told(http: httpx.Client, name: str) -> tuple[str, dict[str, Any]]:
    """An answer's text, and what its usage and timings count: what another tenant's answers must not show
    in."""
    answer = http.post(PATH, json=body(REPEATED, 60, timings_per_token=True), headers=key(name))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    counts = found["usage"] | found["usage"].get("prompt_tokens_details", {}) | found.get("timings", {})
    return str(found["choices"][0]["text"]), {of: counts[of] for of in SEEN if of in counts}


def test_nothing_shows_what_another_key_was_answered(nano_f32: Path, tmp_path: Path) -> None:
    """Drafts from earlier answers (`--draft-history`): not in answers, usage, timings or metrics."""
    (tmp_path / "keys").write_text("first\nsecond\nthird\n")
    arguments = (
        "--model",
        nano_f32,
        "--parallel",
        "4",
        "--ctx-size",
        "4096",
        "--speculation",
        "ngram",
        *EXACT,
    )
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    counted: dict[str, float] = {}
    for asking in (("second",), ("first", "first", "first", "second")):
        with served(*arguments, "--api-key-file", tmp_path / "keys") as http:
            for name in asking:
                before = drafted(http)
                found.setdefault(f"{name} of {len(asking)}", []).append(told(http, name))
                counted[f"{name} of {len(asking)}"] = drafted(http) - before
    assert found["second of 4"] == found["second of 1"], "as on a server that answered nobody else"
    assert counted["second of 4"] == counted["second of 1"]
    assert counted["first of 4"] > counted["second of 1"], "the same key's third answer is drafted"


def drafted(http: httpx.Client) -> float:
    """Drafted tokens so far."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("qwen_drafted_tokens_total"))
