"""LoRA adapters over HTTP: named at start, listed as models, chosen by `model` or `lora`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from qwen_serve.convert import cli
from qwen_serve.server.settings import Settings
from qwen_serve.server.settings_sources import SettingsError, load_settings
from tests.adapters import write_adapter
from tests.conftest import NANO
from tests.server.serving import Served, serving

ASKED: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "poem")):
        write_adapter(folder / name, NANO, seed=seed, size=0.4)
        assert cli.main(["--src", str(folder / name), "--out", str(folder)]) == 0
    return [folder / "sql-F32.gguf", folder / "poem-F32.gguf"]


@pytest.fixture(scope="module")
def server(nano_f32: Path, loras: list[Path]) -> Iterator[Served]:
    with serving(nano_f32, lora=f"sql={loras[0]}, poem={loras[1]}", ctx_size=2048, parallel=2) as served:
        yield served


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def text(http: httpx.Client, **fields: Any) -> str:
    answer = http.post("/v1/completions", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_an_adapter_is_chosen_by_model_or_by_lora(http: httpx.Client) -> None:
    plain, sql, poem = text(http), text(http, model="sql"), text(http, model="poem")
    assert len({plain, sql, poem}) == 3
    assert text(http, model="nano") == text(http, lora=[]) == plain
    assert text(http, lora=[{"id": 0, "scale": 1.0}]) == sql
    assert text(http, lora=[{"id": 1, "scale": 1}, {"id": 0, "scale": 0}], model="nano") == poem
    assert text(http, lora=[{"id": 0, "scale": 0.8}, {"id": 1, "scale": 0.8}]) not in (plain, sql, poem)


def test_other_formats_choose_alike(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 12},
        "/v1/messages": {"messages": messages, "max_tokens": 12},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 12},
        "/api/chat": {"messages": messages, "stream": False, "options": {"num_predict": 12}},
        "/completion": {"prompt": "Hello", "n_predict": 12},
        "/invocations": {"prompt": "Hello", "max_tokens": 12},
    }

    def said(**fields: Any) -> Any:
        body = {**bodies["/v1/chat/completions"], **fields}
        return http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]

    assert said(model="sql") == said(lora=[{"id": 0, "scale": 1.0}]) != said()
    for path, body in bodies.items():
        named = http.post(path, json={**body, "model": "sql"})
        assert named.status_code == 200, path
        unknown = http.post(path, json={**body, "model": "sequel"})
        assert unknown.status_code == 404, path
        assert "this server has nano, sql, poem" in unknown.text


def test_what_there_is(http: httpx.Client, loras: list[Path]) -> None:
    cards = http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["nano", "sql", "poem"]
    assert (cards[1]["parent"], cards[1]["root"]) == ("nano", str(loras[0]))
    assert http.get("/v1/models/poem").json() == cards[2]
    listed = http.get("/lora-adapters").json()
    assert [(one["id"], one["path"]) for one in listed] == [(0, str(loras[0])), (1, str(loras[1]))]
    assert http.post("/v1/load_lora_adapter", json={}).status_code == 501


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"model": "sequel"}, 404, "model: there is no 'sequel'"),
        ({"lora": [{"id": 2, "scale": 1}]}, 400, "lora: there is no adapter 2; there are 0 (sql), 1 (poem)"),
        ({"lora": [{"id": 0, "scale": 1}, {"id": 0, "scale": 2}]}, 400, "lora: an adapter is in it twice"),
        ({"lora": [{"id": 0, "scale": 1}], "model": "poem"}, 400, "names the adapter 'poem' already"),
        ({"lora": [{"id": 0}]}, 400, "scale"),
        ({"lora": [{"id": "sql", "scale": 1}]}, 400, "lora"),
        ({"lora": "sql"}, 400, "lora"),
    ],
)
def test_what_there_is_not(http: httpx.Client, fields: dict[str, Any], status: int, said: str) -> None:
    answer = http.post("/v1/completions", json={**ASKED, **fields})
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith(said.partition(":")[0] if ":" in said else "lora")


def test_flags(nano_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QWEN_LORA", raising=False)
    model = ["--model", str(nano_f32)]
    settings, _, _ = load_settings([*model, "--lora", "a=one.gguf", "--lora", "b=two.gguf,c = three.gguf"])
    wanted = {"a": Path("one.gguf"), "b": Path("two.gguf"), "c": Path("three.gguf")}
    assert settings.adapters == settings.engine().adapters == wanted
    for flag in ("--lora-modules", "--enable-lora", "--lora-scaled"):
        with pytest.raises(SettingsError, match="adapters are named by --lora NAME=FILE"):
            load_settings([*model, flag, "a=one.gguf"])


@pytest.mark.parametrize("given", ["one.gguf", "=one.gguf", "a=", "a=one.gguf,a=two.gguf", "nano=one.gguf"])
def test_names_that_are_none(nano_f32: Path, given: str) -> None:
    with pytest.raises(ValidationError, match=r"NAME=FILE|two adapters|as the model is"):
        Settings(model=nano_f32, alias="nano", lora=given)


def test_ollamas_requests_without_a_prompt_know_the_same_models(http: httpx.Client) -> None:
    for path in ("chat", "generate", "show"):
        for model in ("nano", "sql", "nano:latest"):
            assert http.post(f"/api/{path}", json={"model": model}).status_code == 200, (path, model)
        unknown = http.post(f"/api/{path}", json={"model": "nope"})
        assert unknown.status_code == 404, path
        assert "there is no 'nope'; this server has nano, sql, poem" in unknown.json()["error"]
    assert http.post("/api/show", json={"name": "nope"}).status_code == 404
