"""What clients of llama-server ask for, with a model."""

import errno
import json
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen_serve.server.engine.prefix_cache import file
from tests.server.engine.test_prefix_file import HUGE, forged
from tests.server.serving import Served, serving

PROMPT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def server(nano_f32: Path, folder: Path) -> Iterator[Served]:
    with serving(nano_f32, parallel=2, batch_size=64, ubatch_size=64, slot_save_path=folder) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        yield http


def completed(http: httpx.Client, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    answer = http.post("/completion", json={"prompt": prompt, "n_predict": 24, "ignore_eos": True, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_an_answer_whole_and_streamed(http: httpx.Client) -> None:
    whole = completed(http)
    assert (whole["tokens_predicted"], whole["stop_type"], whole["prompt"]) == (24, "limit", PROMPT)
    body = {"prompt": PROMPT, "n_predict": 24, "ignore_eos": True, "stream": True, "cache_prompt": False}
    with http.stream("POST", "/completion", json={**body, "return_progress": True}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    progress = [each["prompt_progress"] for each in events if "prompt_progress" in each]
    assert progress
    assert progress[-1]["processed"] == progress[-1]["total"] == whole["tokens_evaluated"]
    assert "".join(each["content"] for each in events) == whole["content"]
    tokens = [token for each in events for token in each["tokens"]]
    assert len(tokens) == 24
    assert completed(http, return_tokens=True)["tokens"] == tokens


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/completions", {"prompt": PROMPT, "cache_prompt": False}),
        ("/v1/completions", {"prompt": PROMPT, "cache_prompt": False, "echo": True, "logprobs": 1}),
    ],
)
def test_a_stream_tells_of_a_long_prompts_progress(
    http: httpx.Client, path: str, asked: dict[str, Any]
) -> None:
    body = {**asked, "max_tokens": 4, "stream": True, "return_progress": True, "n": 2}
    with http.stream("POST", path, json=body) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    for index in range(2):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        told = [chunk["prompt_progress"] for chunk in own if "prompt_progress" in chunk]
        assert {*told[0]} == {"total", "cache", "processed", "time_ms"}
        processed = [each["processed"] for each in told]
        assert processed == sorted(processed)
        assert processed[-1] == told[-1]["total"] > 300
        assert all("prompt_progress" in chunk for chunk in own[: len(told)]), "before the first token"
        if "messages" in asked:
            assert own[0]["choices"][0]["delta"]["role"] == "assistant"
        else:
            text = "".join(chunk["choices"][0]["text"] for chunk in own[len(told) :])
            assert text.startswith(PROMPT) is ("echo" in asked)
            assert not any(chunk["choices"][0]["text"] for chunk in own[: len(told)])


def test_samplers_act(http: httpx.Client) -> None:
    """Each by itself changes what is drawn; the same seed draws the same again."""
    base: dict[str, Any] = {
        "prompt": "Once upon",
        "temperature": 1.2,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "seed": 7,
        "n_predict": 40,
    }
    changes: dict[str, Any] = {
        "DRY": {"prompt": PROMPT, "dry_multiplier": 5, "dry_allowed_length": 1},
        "XTC": {"xtc_probability": 1, "xtc_threshold": 0.05},
        "typical": {"typical_p": 0.3},
        "sigma": {"top_n_sigma": 0.5},
        "mirostat": {"mirostat": 2, "mirostat_tau": 1},
        "dynamic": {"temperature": 3, "dynatemp_range": 3},
        "penalty": {"repeat_penalty": 2, "repeat_last_n": 8},
    }
    for name, fields in changes.items():
        same = {name: fields[name] for name in ("prompt", "temperature") if name in fields}
        plain = completed(http, **{**base, **same})["content"]
        changed = [completed(http, **{**base, **fields})["content"] for _ in range(2)]
        assert changed[0] == changed[1] != plain, name
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "seed": 7, **changes["XTC"]}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200


def test_slots(http: httpx.Client) -> None:
    idle = http.get("/slots").json()
    assert [slot["id"] for slot in idle] == [0, 1]
    assert not any(slot["is_processing"] for slot in idle)
    body = {"prompt": "Once", "n_predict": 4000, "ignore_eos": True, "stream": True, "top_k": 7}
    with http.stream("POST", "/completion", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        with httpx.Client(base_url=http.base_url, timeout=60) as other:
            busy = [slot for slot in other.get("/slots").json() if slot["is_processing"]]
            assert other.get("/slots", params={"fail_on_no_slot": 1}).status_code == 200
    [slot] = busy
    assert slot["params"]["top_k"] == 7
    assert slot["n_prompt_tokens"] > 0
    [following] = slot["next_token"]
    assert following["n_decoded"] > 0
    assert following["n_decoded"] + following["n_remain"] == 4000
    assert "Once" not in json.dumps(slot)


@pytest.mark.parametrize(("action", "part"), [("save", "_put"), ("restore", "_get")])
def test_a_slow_disk_keeps_no_request_waiting(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, action: str, part: str
) -> None:
    def act(what: str) -> httpx.Response:
        return http.post("/slots/0", params={"action": what}, json={"filename": "slow.bin"})

    completed(http, "The disk was slow, and everybody slept. " * 30)
    assert act("save").json()["n_saved"] > 64
    begun, may_go_on, real = threading.Event(), threading.Event(), getattr(file, part)

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert may_go_on.wait(60)
        return real(*arguments)

    monkeypatch.setattr(file, part, slow)
    with ThreadPoolExecutor(1) as pool:
        try:
            acting = pool.submit(act, action)
            assert begun.wait(60)
            assert len(completed(http, return_tokens=True)["tokens"]) == 24
            assert not acting.done()
        finally:
            may_go_on.set()
        assert acting.result().json()[f"n_{action}d"] > 64


def test_what_is_kept_goes_to_a_file_and_back(http: httpx.Client) -> None:
    def act(action: str, name: str = "one.bin", slot: str = "0") -> Any:
        return http.post(f"/slots/{slot}", params={"action": action}, json={"filename": name})

    prompt = "It was a dark and stormy night. " * 30
    first = completed(http, prompt)
    saved = act("save").json()
    assert saved.keys() == {"id_slot", "filename", "n_saved", "n_written", "timings"}
    assert saved["n_saved"] > 64
    assert completed(http, prompt)["timings"]["cache_n"] > 64
    assert http.post("/slots/0?action=erase").json()["n_erased"] > 0
    assert completed(http, prompt, cache_prompt=False)["timings"]["cache_n"] == 0
    salted = {"filename": "one.bin", "cache_salt": "another's"}
    assert http.post("/slots/0", params={"action": "save"}, json=salted).json()["n_saved"] == 0
    restored = act("restore").json()
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    again = completed(http, prompt)
    assert again["timings"]["cache_n"] > 64
    assert again["content"] == first["content"]
    for wrong in ("../one.bin", "", "a/b", ".hidden"):
        assert act("save", wrong).json()["error"]["param"] == "filename"
    missing = act("restore", "nothing.bin").json()["error"]
    assert missing["param"] == "filename"
    assert missing["message"].endswith("it cannot be read: No such file or directory")
    assert act("forget").json()["error"]["param"] == "action"
    assert act("save", slot="7").status_code == 400


@pytest.mark.parametrize("change", [{"about.json": b"[" * 100_000}, {"0/state.npy": HUGE}])
def test_a_forged_slot_file_is_refused(http: httpx.Client, folder: Path, change: dict[str, bytes]) -> None:
    completed(http, "The files were forged, and everybody read. " * 30)
    assert http.post("/slots/0?action=save", json={"filename": "forged.bin"}).json()["n_saved"] > 64
    saved = folder / "forged.bin"
    saved.write_bytes(forged(saved.read_bytes(), change))
    refused = http.post("/slots/0?action=restore", json={"filename": "forged.bin"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "filename"
    assert str(folder) not in refused.text


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EACCES, 400)]
)
def test_a_disk_that_refuses_is_told_without_its_paths(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number), "/somewhere/of/ours")

    completed(http, "The disk was full, and everybody wrote. " * 30)
    monkeypatch.setattr(file, "_put", full)
    refused = http.post("/slots/0?action=save", json={"filename": "full.bin"})
    assert refused.status_code == status
    error = refused.json()["error"]
    assert error["message"] == f"filename: full.bin is not saved: {os.strerror(number)}"
    assert error["param"] == "filename"


def test_a_full_disk(http: httpx.Client) -> None:
    """The system's own error, for a file that may not grow."""
    completed(http, "The disk was full, and everybody wrote. " * 30)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        refused = http.post("/slots/0?action=save", json={"filename": "full.bin"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.status_code == 507
    assert "/" not in refused.json()["error"]["message"]
