"""Pictures from checkpoint to answers: nano and its tower are converted, served, and asked about pictures."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.gates.estimate import Paired
from qwen_serve.bench.gates.gate import NANO_FOLDER
from qwen_serve.bench.gates.quality import SAMPLES
from qwen_serve.bench.gates.samples import read_samples
from qwen_serve.bench.store import load
from tests.heldout import read
from tests.server.seeing import needs_vision
from tests.server.serving import EXACT, ServerProcess

pytestmark = [pytest.mark.slow, needs_vision]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with nano in F16, which finds the vision tower beside it."""
    folder = tmp_path_factory.mktemp("seeing")
    how = ["--src", str(NANO_FOLDER), "--quant", "F16", "--out", str(folder), "--threads", "1"]
    subprocess.run([sys.executable, "-m", "qwen_serve.convert", *how], check=True)
    with ServerProcess("--model", folder / "nano-F16.gguf", *EXACT) as server:
        server.wait_ready()
        yield server


def test_answers_are_those_of_the_reference(server: ServerProcess, tmp_path: Path) -> None:
    """The reference implementation's in float32: the gate passes, and single answers differ seldom."""
    argv = ["--url", server.url, "--tasks", "nano_pictures", "--limit", "100", "--out", str(tmp_path)]
    assert main(["quality", *argv]) == 0, server.log
    (run,) = load([tmp_path]).manifests
    samples = read_samples(tmp_path / run / SAMPLES)
    assert len(samples) == 100
    assert all(sample.reference is not None for sample in samples)
    paired = Paired.of((sample.outcomes, sample.reference or []) for sample in samples)
    assert paired.lost + paired.gained <= 3, paired


def ask(http: httpx.Client, picture: str, question: str, **fields: Any) -> tuple[str, int, int]:
    """(answer, tokens of the picture, tokens from the cache)."""
    shown = {"type": "image_url", "image_url": {"url": picture}}
    content = [shown, {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    said = answer.json()["choices"][0]["message"]["content"]
    return said, details["image_tokens"], details["cached_tokens"]


def test_a_second_question_is_answered_from_the_cache(server: ServerProcess) -> None:
    """Two pictures of the same size get different answers."""
    rows = [row for row in read("pictures") if row["kind"] == "digit"]
    asked = ("Which digit is it?", "What colour is the digit?", "Where is the digit?")
    with server.client() as http:
        for row in rows[:3]:
            question = next(one for one in asked if one != row["question"])
            _, image_tokens, before = ask(http, row["picture"], question)
            assert before < image_tokens
            answer, _, cached = ask(http, row["picture"], row["question"])
            assert answer == row["answer"]
            assert cached >= image_tokens
