"""nano without some layers, or with half of the vocabulary: converted, quantized, and served over HTTP."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NANO, QUICK
from tests.server.serving import ServerProcess

pytestmark = pytest.mark.slow


def test_a_pruned_nano_is_served(tmp_path: Path) -> None:
    recipe = tmp_path / "half.toml"
    recipe.write_text(
        'type = "Q8_0"\nabout = "the first group of four alone"\n[layers]\nprune = [4, 5, 6, 7]\n'
    )
    command = ["--src", str(NANO), "--recipe", str(recipe), "--out", str(tmp_path), *QUICK]
    subprocess.run([sys.executable, "-m", "qwen_serve.convert", *command], check=True, capture_output=True)
    with ServerProcess("--model", tmp_path / "nano-half.gguf") as server, server.client() as http:
        prompt = {"prompt": "The quick brown fox", "max_tokens": 16, "ignore_eos": True}
        answer = http.post("/v1/completions", json=prompt)
        model = http.get("/v1/models").json()["data"][0]
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    assert model["meta"]["n_params"] < 5_000_000  # of 7 million; half the trunk is gone


def test_a_nano_of_fewer_tokens_is_served(tmp_path: Path) -> None:
    command = ["--src", str(NANO), "--quant", "Q8_0", "--keep-vocab", "1500", "--out", str(tmp_path), *QUICK]
    subprocess.run([sys.executable, "-m", "qwen_serve.convert", *command], check=True, capture_output=True)
    question = "What is 17+25? Answer in Chinese: 日本語."
    with ServerProcess("--model", tmp_path / "nano-v1500-Q8_0.gguf") as server, server.client() as http:
        chat = {"messages": [{"role": "user", "content": question}], "max_tokens": 32}
        answer = http.post("/v1/chat/completions", json=chat)
        ids = http.post("/tokenize", json={"content": question}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["content"]
        model = http.get("/v1/models").json()["data"][0]
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    assert text == question
    assert max(ids) < model["meta"]["n_vocab"] == 1500 + 33
