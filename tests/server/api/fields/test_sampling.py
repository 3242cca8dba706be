"""The sampling parameters that a request gets."""

from typing import Any

import pytest

from qwen_serve.server.api.fields.sampling import SamplingDefaults, sampling_defaults
from qwen_serve.server.engine import LLAMA_CPP_SAMPLERS, SAMPLERS, SamplingParams
from tests.messages import user
from tests.server.api.conftest import Start

ADVICE = {
    "general.sampling.temp": "0.6",
    "general.sampling.top_p": "0.95",
    "general.sampling.top_k": "20",
    "general.sampling.min_p": "0.05",
    "general.sampling.penalty_repeat": "1.1",
}


def test_defaults_come_from_the_gguf() -> None:
    advised = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1)
    assert sampling_defaults(ADVICE, greedy=False) == SamplingDefaults(advised, advised, advised)
    assert sampling_defaults(ADVICE, greedy=True).text.temperature == 0
    assert sampling_defaults({}, greedy=False).thinking == SamplingParams()


CARD = {
    "card": {"thinking": (1.0, 0.95, 20, 1.5), "instruct": (0.7, 0.8, 20, 1.5)},
    "card-coding": {"thinking": (0.6, 0.95, 20, 0.0), "instruct": (0.7, 0.8, 20, 1.5)},
    "file": {"thinking": (0.6, 0.95, 20, 0.0), "instruct": (0.6, 0.95, 20, 0.0)},
}


@pytest.mark.parametrize("source", CARD)
def test_defaults_by_mode(start: Start, source: str) -> None:
    server = start("x", metadata=ADVICE, sampling_defaults=source)
    for thinking, mode in ((True, "thinking"), (False, "instruct")):
        server.chat(thinking=thinking)
        params = server.engine.submissions[-1].params
        found = params.temperature, params.top_p, params.top_k, params.presence_penalty
        assert found == CARD[source][mode]
    server.post("/v1/completions", prompt="x")
    params = server.engine.submissions[-1].params
    assert (params.temperature, params.presence_penalty) == (0.6, 0)


def test_a_request_has_the_last_word_on_the_card(start: Start) -> None:
    server = start("x", sampling_defaults="card")
    server.chat(temperature=0.3, presence_penalty=0)
    params = server.engine.submissions[-1].params
    assert (params.temperature, params.top_p, params.presence_penalty) == (0.3, 0.8, 0)
    for fields in ({"temperature": 0}, {"temperature": 0, "thinking": True}):
        server.chat(**fields)
        assert server.engine.submissions[-1].params.presence_penalty == 0
    server.chat(temperature=0, presence_penalty=1)
    assert server.engine.submissions[-1].params.presence_penalty == 1
    server.post("/invocations", messages=[user("x")])
    assert server.engine.submissions[-1].params.temperature == 0
    greedy = start("x", sampling_defaults="card", greedy=True)
    greedy.chat()
    params = greedy.engine.submissions[-1].params
    assert (params.temperature, params.presence_penalty) == (0, 0)


@pytest.mark.parametrize("value", ["warm", "nan", "-1", ""])
def test_advice_that_cannot_be_used(value: str) -> None:
    with pytest.raises(ValueError, match=r"general\.sampling"):
        sampling_defaults({"general.sampling.temp": value}, greedy=False)


@pytest.mark.parametrize(
    ("path", "settings", "fields", "temperature"),
    [
        ("/v1/completions", {}, {}, 0.6),
        ("/v1/chat/completions", {}, {}, 0.6),
        ("/invocations", {}, {}, 0),
        ("/invocations", {}, {"temperature": None}, 0),
        ("/invocations", {}, {"temperature": 0.9}, 0.9),
        ("/v1/completions", {"greedy": True}, {}, 0),
        ("/v1/chat/completions", {"greedy": True}, {}, 0),
        ("/v1/chat/completions", {"greedy": True}, {"temperature": 0.3}, 0.3),
        ("/v1/chat/completions", {}, {"temperature": 0}, 0),
    ],
)
def test_temperature(start_shared: Start, path: str, settings: Any, fields: Any, temperature: float) -> None:
    server = start_shared("x", metadata=ADVICE, **settings)
    body: Any = {"prompt": "x"} if path != "/v1/chat/completions" else {"messages": [user("x")]}
    assert server.post(path, **body, **fields).status_code == 200
    params = server.engine.submissions[-1].params
    assert params.temperature == temperature
    assert params.top_k == 20


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_p": 0.5, "top_k": 5, "min_p": 0.1}, {"top_p": 0.5, "top_k": 5, "min_p": 0.1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        (
            {"presence_penalty": 1.5, "frequency_penalty": -0.5},
            {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        ),
        ({"seed": 42}, {"seed": 42}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"repeat_last_n": 64}, {"repeat_last_n": 64, "samplers": SAMPLERS}),
        (
            {"typical_p": 0.5, "top_n_sigma": 1, "xtc_probability": 0.5, "xtc_threshold": 0.2},
            {"typical_p": 0.5, "top_n_sigma": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.2},
        ),
        (
            {"dynatemp_range": 0.5, "dynatemp_exponent": 2, "min_keep": 3},
            {"dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "min_keep": 3},
        ),
        (
            {"mirostat": 2, "mirostat_tau": 3, "mirostat_eta": 0.2},
            {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
        ),
        (
            {"dry_multiplier": 0.8, "dry_base": 0.5, "dry_allowed_length": 3, "dry_penalty_last_n": -1},
            {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 3, "dry_penalty_last_n": -1},
        ),
        ({"dry_sequence_breakers": ["\n", "end"]}, {"dry_sequence_breakers": ("\n", "end")}),
        (
            {"samplers": ["Top-K", "minp", "typical_p", "temp"]},
            {"samplers": ("top_k", "min_p", "typ_p", "temperature")},
        ),
        (
            {"samplers": "edkypmxta"},
            {"samplers": tuple(name for name in LLAMA_CPP_SAMPLERS if name != "top_n_sigma")},
        ),
        ({"samplers": []}, {"samplers": ()}),
    ],
)
def test_fields_reach_the_engine(
    start_shared: Start, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    server = start_shared("x")
    assert server.chat(**fields).status_code == 200
    params = server.engine.submissions[-1].params
    assert {name: getattr(params, name) for name in expected} == expected


def test_what_dry_looks_for_is_found_before_and_elsewhere(start: Start) -> None:
    """It takes long: neither the event loop nor the engine's thread waits for it."""
    server = start("x")
    assert server.chat().status_code == 200
    assert not server.engine.dries.asked
    assert server.chat(dry_multiplier=0.5, n=2).status_code == 200
    [(params, thread)] = server.engine.dries.asked
    assert params == server.engine.submissions[-1].params
    assert thread not in server.engine.loop_threads


def test_a_files_advice_in_llama_cpps_words() -> None:
    """All of LLM_KV_GENERAL_SAMPLING_* but the order."""
    told = {"xtc_probability": "0.5", "xtc_threshold": "0.2", "mirostat": "2", "mirostat_tau": "3"}
    told |= {"mirostat_eta": "0.2", "penalty_last_n": "32"}
    params = sampling_defaults(
        {f"general.sampling.{key}": text for key, text in told.items()}, greedy=False
    ).text
    assert (params.xtc_probability, params.xtc_threshold, params.repeat_last_n) == (0.5, 0.2, 32)
    assert (params.mirostat, params.mirostat_tau, params.mirostat_eta) == (2, 3.0, 0.2)
