"""lm-eval with the served nano model: its log-likelihoods agree with the logits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.conftest import NANO
from tests.logits import log_softmax
from tests.server.engine.helpers import EXACT, Alone
from tests.server.serving import EXACT as EXACT_FLAGS
from tests.server.serving import ServerProcess

pytestmark = pytest.mark.slow

pytest.importorskip("lm_eval.models")  # registers them, whatever else has imported lm_eval before

N_DOCS = 6
CLOSE = 1e-3
"""Sums over a few tokens, in F32."""


@pytest.fixture(scope="module")
def server(nano_f32: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--model", nano_f32, "--parallel", "4", "--ctx-size", "8192", *EXACT_FLAGS) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = (NANO / "heldout" / "knowledge.jsonl").read_text(encoding="utf-8").splitlines()[:N_DOCS]
    path = tmp_path_factory.mktemp("lm_eval") / "documents.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def evaluate(model: str, url: str, documents: Path, monkeypatch: Any, **task: Any) -> Any:
    """What lm-eval finds in a task of these documents."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    def encode(self: Any, text: str) -> list[int]:
        """Where /tokenize speaks llama-server's language only."""
        answer = self.session.post(f"{self.base_url}/tokenize", json={"content": text})
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    if httpx.post(f"{url}/tokenize", json={"prompt": "x"}, timeout=60).status_code == 400:
        monkeypatch.setattr("lm_eval.utils.RemoteTokenizer.encode", encode)
    path = "/v1/completions" if model == "local-completions" else "/v1/chat/completions"
    config = {
        "task": "nano_local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
        **task,
    }
    (documents.parent / "nano_local.yaml").write_text(json.dumps(config), encoding="utf-8")
    return lm_eval.simple_evaluate(
        model=model,
        model_args={
            "base_url": url + path,
            "model": "nano",
            "tokenizer_backend": "remote" if model == "local-completions" else None,
            "num_concurrent": 2,
        },
        tasks=["nano_local"],
        task_manager=TaskManager(include_path=str(documents.parent), include_defaults=False),
        apply_chat_template=model == "local-chat-completions",
        log_samples=True,
        bootstrap_iters=0,
    )


def teacher_forced(alone: Alone, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether it is what greedy decoding gives."""
    tokens = [*context, *continuation]
    rows = [log_softmax(row) for row in alone.logits(tokens[:-1], chunk=512)][len(context) - 1 :]
    total = sum(float(row[token]) for row, token in zip(rows, continuation, strict=True))
    return total, all(int(row.argmax()) == token for row, token in zip(rows, continuation, strict=True))


@pytest.fixture
def alone(nano_f32: Path) -> Iterator[Alone]:
    """The same model with nobody beside, and every token of it."""
    alone = Alone(nano_f32, **EXACT)
    alone.eog, alone.n_real = [], alone.model.n_vocab
    yield alone
    alone.close()


def test_loglikelihood_of_choices(
    server: ServerProcess, documents: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = evaluate(
        "local-completions",
        server.url,
        documents,
        monkeypatch,
        output_type="multiple_choice",
        doc_to_text="Question: {{question}}\nAnswer:",
        doc_to_choice="{{options}}",
        doc_to_target="answer_index",
        metric_list=[{"metric": "acc"}],
    )
    right = 0
    for sample in found["samples"]["nano_local"]:
        text = f"Question: {sample['doc']['question']}\nAnswer:"
        context = alone.model.tokenize(text.encode(), special=True)
        expected = []
        for option, [(logprob, is_greedy)] in zip(sample["doc"]["options"], sample["resps"], strict=True):
            whole = alone.model.tokenize(f"{text} {option}".encode(), special=True)
            assert whole[: len(context)] == context
            reference, greedy = teacher_forced(alone, context, whole[len(context) :])
            assert float(logprob) == pytest.approx(reference, abs=CLOSE)
            assert (str(is_greedy) == "True") == greedy
            expected.append(reference)
        right += int(np.argmax(expected)) == sample["doc"]["answer_index"]
    assert len(found["samples"]["nano_local"]) == N_DOCS
    assert found["results"]["nano_local"]["acc,none"] == pytest.approx(right / N_DOCS)


def test_loglikelihood_of_texts(
    server: ServerProcess, documents: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = evaluate(
        "local-completions",
        server.url,
        documents,
        monkeypatch,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{cot_content}}",
        metric_list=[{"metric": "word_perplexity"}],
    )
    for sample in found["samples"]["nano_local"]:
        ids = alone.model.tokenize(sample["doc"]["cot_content"].encode(), special=True)
        reference, _ = teacher_forced(alone, [alone.model.eos], ids)
        assert float(sample["resps"][0][0]) == pytest.approx(reference, abs=10 * CLOSE)


def test_answers_of_a_chat(server: ServerProcess, documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = evaluate(
        "local-chat-completions",
        server.url,
        documents,
        monkeypatch,
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="answer",
        generation_kwargs={"until": ["\n\n"], "max_gen_toks": 24, "temperature": 0},
        metric_list=[{"metric": "exact_match"}],
    )
    samples = found["samples"]["nano_local"]
    assert len(samples) == N_DOCS
    for sample in samples:
        body = {
            "messages": [{"role": "user", "content": sample["doc"]["question"]}],
            "max_tokens": 24,
            "temperature": 0,
            "stop": ["\n\n"],
        }
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        assert sample["resps"][0][0] == answer["choices"][0]["message"]["content"]


def test_the_tokenizer_as_lm_eval_asks_for_it(server: ServerProcess) -> None:
    info = httpx.get(f"{server.url}/tokenizer_info", timeout=60).json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] is None
    assert "<|im_start|>" in info["chat_template"]
