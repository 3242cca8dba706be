"""/completion, as in llama-server."""

import json
from typing import Any

import pytest

from qwen_serve.server.engine import LLAMA_CPP_SAMPLERS
from tests.server.api.conftest import Server, Start
from tests.server.api.test_bad_input import error_of

FINAL = {
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated"),
    *("generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word"),
    *("tokens_cached", "timings"),
}
"""Fields of `server_task_result_cmpl_final::to_json_non_oaicompat` (llama.cpp, tools/server)."""

TIMINGS = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
}


@pytest.fixture
def server(start: Start) -> Server:
    return start("one\ntwo", alias="fake")


def events(server: Server, **body: Any) -> list[dict[str, Any]]:
    found = []
    with server.http.stream("POST", "/completion", json={"stream": True, **body}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            assert not line or line.startswith("data: {"), "nothing else, and no [DONE]"
            found += [json.loads(line.removeprefix("data: "))] if line else []
    return found


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_whole_answer(server: Server, path: str) -> None:
    found = server.post(path, prompt="Hi<|im_end|>", n_predict=50, temperature=0.5).json()
    assert found.keys() == FINAL
    assert found["timings"].keys() - {"queue_ms"} == TIMINGS
    told = {name: value for name, value in found.items() if name not in ("timings", "generation_settings")}
    assert told == {
        "index": 0,
        "content": "one\ntwo",
        "tokens": [],
        "id_slot": -1,
        "stop": True,
        "model": "fake",
        "tokens_predicted": 7,
        "tokens_evaluated": 3,
        "prompt": "Hi<|im_end|>",
        "has_new_line": True,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
        "tokens_cached": 10,
    }
    settings = found["generation_settings"]
    assert (settings["temperature"], settings["n_predict"], settings["repeat_last_n"]) == (0.5, 50, 64)
    assert settings["samplers"] == list(LLAMA_CPP_SAMPLERS)


def test_the_order_of_samplers_is_llama_cpps(server: Server) -> None:
    server.post("/completion", prompt="x")
    params = server.engine.submissions[-1].params
    assert (params.samplers, params.repeat_last_n) == (LLAMA_CPP_SAMPLERS, 64)
    server.post("/completion", prompt="x", samplers=["top_k"], repeat_last_n=3)
    params = server.engine.submissions[-1].params
    assert (params.samplers, params.repeat_last_n) == (("top_k",), 3)
    assert server.engine.submissions[-1].limit == 4095, "to the end of the context"


def test_why_it_ended(server: Server) -> None:
    found = server.post("/completion", prompt="x", stop=["\n", "never"]).json()
    assert (found["content"], found["stop_type"], found["stopping_word"]) == ("one", "word", "\n")
    assert not found["has_new_line"]
    found = server.post("/completion", prompt="x", n_predict=2).json()
    assert (found["content"], found["stop_type"], found["tokens_predicted"]) == ("on", "limit", 2)


def test_several_answers_are_a_list(server: Server) -> None:
    found = server.post("/completion", prompt=["a", "b"], n_cmpl=2, seed=5).json()
    assert [answer["index"] for answer in found] == [0, 1, 2, 3]
    assert [answer["prompt"] for answer in found] == ["a", "a", "b", "b"]
    assert [answer["generation_settings"]["seed"] for answer in found] == [5, 6, 5, 6]
    streamed = events(server, prompt=["a", "b"])
    for index in (0, 1):
        assert "".join(part["content"] for part in streamed if part["index"] == index) == "one\ntwo"


def test_a_stream(server: Server) -> None:
    *parts, last = events(server, prompt="Hi", timings_per_token=True)
    assert "".join(part["content"] for part in parts) == "one\ntwo"
    assert [token for part in parts for token in part["tokens"]] == list(b"one\ntwo")
    assert all(part["stop"] is False and part["timings"].keys() >= TIMINGS for part in parts)
    assert [part["tokens_predicted"] for part in parts] == sorted(part["tokens_predicted"] for part in parts)
    assert last.keys() == FINAL
    assert (last["content"], last["stop"], last["has_new_line"], last["tokens"]) == ("", True, True, [])
    assert "timings" not in events(server, prompt="Hi")[0]


def test_tokens_and_probabilities(server: Server) -> None:
    found = server.post("/completion", prompt="x", return_tokens=True, n_probs=2).json()
    assert found["tokens"] == list(b"one\ntwo")
    first = found["completion_probabilities"][0]
    assert first.keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert (first["id"], first["token"], len(first["top_logprobs"])) == (ord("o"), "o", 2)
    *parts, last = events(server, prompt="x", n_probs=1)
    told = [token for part in parts for token in part["completion_probabilities"]]
    assert [token["id"] for token in told] == list(b"one\ntwo")
    assert "completion_probabilities" not in last
    stopped = server.post("/completion", prompt="x", return_tokens=True, stop="two").json()
    assert stopped["tokens"] == list(b"one\n")


def test_progress_ends_with_the_whole_prompt(server: Server) -> None:
    first, second, *_ = events(server, prompt="Hello", return_progress=True)
    assert first["prompt_progress"].keys() == {"total", "cache", "processed", "time_ms"}
    assert (first["prompt_progress"]["total"], first["prompt_progress"]["processed"]) == (5, 5)
    assert (first["content"], second["content"]) == ("", "o")
    assert "prompt_progress" not in second
    assert "prompt_progress" not in server.post("/completion", prompt="Hello", return_progress=True).json()


def test_fields_that_are_asked_for(server: Server) -> None:
    wanted = ["content", "timings/prompt_n", "nothing", "nothing/content", "generation_settings/top_k/x"]
    found = server.post("/completion", prompt="Hi", response_fields=wanted).json()
    assert found == {"content": "one\ntwo", "timings/prompt_n": 2}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "post_sampling_probs": True}, "post_sampling_probs"),
        ({"prompt": "x", "t_max_predict_ms": 5}, "t_max_predict_ms"),
        ({"prompt": "x", "n_probs": 21}, "n_probs"),
        ({"prompt": "x", "return_progress": 1}, "return_progress"),
        ({"prompt": "x", "response_fields": "content"}, "response_fields"),
        ({}, "prompt"),
    ],
)
def test_what_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    assert error_of(server.post("/completion", **fields), 400)["param"] == param
