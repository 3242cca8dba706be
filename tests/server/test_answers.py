"""With `--deterministic` every kind of request gets the same answer under any load and with any drafter:
`qwen-bench soak answers` with nano."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.llamacpp import HAS_BATCH_INVARIANCE
from tests.server.serving import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_BATCH_INVARIANCE, reason="llama.cpp is built without batch-invariant"),
]

AS_IT_COMES: dict[str, Any] = {"cache_type_k": "f16", "cache_type_v": "f16", "flash_attn": "auto"}
DRAFTS = ("off", "ngram", "mtp", "both", "draft")


def asked(
    model: Path, store: Path, servers: dict[str, dict[str, Any]], *options: str
) -> tuple[int, dict[str, Any]]:
    """(exit status of the command, verdict)."""
    words = [
        "--gguf",
        str(model),
        "--input-tokens",
        "64",
        "--output-tokens",
        "20",
        "--out",
        str(store),
        *options,
    ]
    with ExitStack() as running:
        for name, changes in servers.items():
            made = {**AS_IT_COMES, "greedy": False, "parallel": 64, "ctx_size": 64 * 1024, **changes}
            words += ["--peer", f"{name}={running.enter_context(serving(model, **made)).url}"]
        status = main(["soak", "answers", *words])
    [verdict] = store.rglob("verdict.json")
    found: dict[str, Any] = json.loads(verdict.read_text(encoding="utf-8"))
    return status, found


def test_an_answer_is_the_same_alone_in_company_and_with_all_drafts(
    nano_q4_k_m: Path, nano_draft_q4_k_m: Path, tmp_path: Path
) -> None:
    servers: dict[str, dict[str, Any]] = {"alone": {"speculation": "off", "prefix_cache": False}}
    servers |= {way: {"speculation": way, "draft_always": True} for way in DRAFTS}
    servers["draft"]["draft_model"] = nano_draft_q4_k_m
    for server in servers.values():
        server["deterministic"] = True
    status, found = asked(nano_q4_k_m, tmp_path, servers, "--requests", "66", "--aborts", "0.2")
    assert (status, found["errors"], found["differences"]) == (0, [], [])
    assert found["compared"] > 1000
    assert found["left"] > 50
    for way in DRAFTS[1:]:
        assert sum(cell.get("accepted_tokens", 0) for cell in found["servers"][way].values()) > 0, way


@pytest.mark.parametrize("budget", [0, 512])
def test_sampled_on_the_device_too(nano_q4_k_m: Path, tmp_path: Path, budget: int) -> None:
    """As on every GPU. With chunks of 512 as there, too."""
    how: dict[str, Any] = {
        "deterministic": True,
        "sampling": "device",
        "parallel": 32,
        "prefill_budget": budget,
    }
    servers: dict[str, dict[str, Any]] = {"alone": {**how, "speculation": "off", "prefix_cache": False}}
    servers["drafts"] = {**how, "speculation": "ngram", "draft_always": True}
    words = ["--requests", "66", "--levels", "32,8", "--aborts", "0.2"]
    status, found = asked(nano_q4_k_m, tmp_path, servers, *words)
    assert (status, found["errors"], found["differences"]) == (0, [], [])
    assert found["compared"] > 300


HARD: dict[str, dict[str, Any]] = {
    "earlier answers": {"speculation": "ngram", "draft_history": 65_536},
    "f32": {"speculation": "both", "cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"},
}


@pytest.mark.parametrize("way", HARD)
def test_in_f32_and_with_drafts_from_earlier_answers_too(
    nano_q4_k_m: Path, nano_f32: Path, tmp_path: Path, way: str
) -> None:
    model = nano_f32 if way == "f32" else nano_q4_k_m
    how: dict[str, Any] = {"deterministic": True, "sampling": "device", "parallel": 8, "ctx_size": 8 * 640}
    kept = {name: value for name, value in HARD[way].items() if name.startswith(("cache_type", "flash"))}
    servers = {"alone": {**how, **kept, "speculation": "off", "prefix_cache": False}}
    servers[way] = {**how, **HARD[way], "draft_always": True}
    words = ["--requests", "44", "--levels", "8,5", "--aborts", "0.2"]
    status, found = asked(model, tmp_path, servers, *words)
    assert (status, found["errors"], found["differences"]) == (0, [], [])
    drafts = found["servers"][way].values()
    assert all(cell["drafted_tokens"] > cell["accepted_tokens"] > 0 for cell in drafts)


def test_experts_too(nano_moe_q4_k_m: Path, tmp_path: Path) -> None:
    servers = {
        way: {"speculation": way, "draft_always": way != "off", "deterministic": True, "parallel": 16}
        for way in ("off", "both")
    }
    status, found = asked(nano_moe_q4_k_m, tmp_path, servers, "--requests", "18", "--levels", "16")
    assert (status, found["errors"], found["differences"]) == (0, [], [])


def test_without_it_answers_differ(nano_q4_k_m: Path, tmp_path: Path) -> None:
    """Otherwise the tests above could not fail."""
    status, found = asked(nano_q4_k_m, tmp_path, {"default": {}}, "--requests", "18", "--levels", "18")
    assert status == 1
    assert found["differ"] > 0
    assert found["differences"][0]["alone"] != found["differences"][0]["here"]
    assert not found["errors"]
