"""Texts that differ in kind from what a model is calibrated on."""

from pathlib import Path

import numpy as np
import pytest

from qwen_serve.convert import evaluation
from qwen_serve.convert.calibration import text as writing
from qwen_serve.convert.calibration import write_text
from qwen_serve.convert.calibration.prompts import load_prompts
from qwen_serve.convert.chunks import CHUNK_SIZE
from qwen_serve.convert.evaluation import KINDS, Kind, write_unlike
from qwen_serve.convert.kld import UNLIKE_CHUNKS, spaced
from qwen_serve.llamacpp.evaluation import Runtime

RUNTIME = Runtime(threads=1, n_gpu_layers=0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_long_enough_and_always_the_same(kind: Kind, nano_f16: Path, tmp_path: Path) -> None:
    for name in ("1", "2"):
        write_unlike(nano_f16, tmp_path / name, kind=kind, runtime=RUNTIME)
    text = (tmp_path / "1").read_text(encoding="utf-8")
    assert text == (tmp_path / "2").read_text(encoding="utf-8")
    with RUNTIME.load(nano_f16) as model:
        assert len(model.tokenize(text)) >= UNLIKE_CHUNKS * CHUNK_SIZE
    for purpose in ("calibration", "search", "evaluation"):
        assert not [prompt for prompt in load_prompts(purpose) if prompt.text in text]


def test_chat_is_in_the_models_own_template_with_thinking_and_tools(nano_f16: Path, tmp_path: Path) -> None:
    write_unlike(nano_f16, tmp_path / "chat", kind="chat", runtime=RUNTIME)
    text = (tmp_path / "chat").read_text(encoding="utf-8")
    for mark in ("<tools>", "<tool_call>\n<function=", "<tool_response>", "<think>\n", "<|im_end|>"):
        assert text.count(mark) >= evaluation.texts.CONVERSATIONS // 2, mark


def test_chunks_are_evenly_spaced() -> None:
    chunks = np.arange(21, dtype=np.int32)[:, None]
    assert spaced(chunks, 8)[:, 0].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert len(spaced(chunks[:5], 8)) == 5


def test_calibration_ends_with_pseudo_random_tokens_and_evaluation_does_not(
    nano_f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MIN_TOKENS", {"calibration": 300, "evaluation": 300})
    monkeypatch.setattr(writing, "load_prompts", lambda purpose: load_prompts(purpose)[::40])
    monkeypatch.setattr(writing, "MAX_NEW", 40)
    counts = {}
    for random in (0, 4096):
        monkeypatch.setattr(writing, "RANDOM_TOKENS", {"calibration": random, "evaluation": 0})
        for purpose in ("calibration", "evaluation"):
            write_text(nano_f16, tmp_path / f"{purpose}{random}", purpose=purpose, runtime=RUNTIME)
        with RUNTIME.load(nano_f16) as model:
            ids = model.tokenize((tmp_path / f"calibration{random}").read_text(encoding="utf-8"))
        counts[random] = len(ids), len(set(ids))
    assert counts[4096][0] > counts[0][0] + 2000, "tokens"
    assert counts[4096][1] > counts[0][1] + 500, "different tokens"
    assert (tmp_path / "evaluation0").read_text() == (tmp_path / "evaluation4096").read_text()
