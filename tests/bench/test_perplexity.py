"""Perplexity and divergence of tiny random models, against values from all log-probabilities."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.perplexity import Measured, Reading, estimate, measure
from qwen_serve.bench.report.perplexity import WORKLOAD
from qwen_serve.bench.store import load
from qwen_serve.convert import kld
from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.cli import main as convert
from qwen_serve.llamacpp.evaluation import Runtime
from tests.checkpoints import write_checkpoint
from tests.logits import gguf_log_probabilities

import numpy as np  # isort: skip  (after llama_cpp: see llamacpp/__init__.py)

CONTEXT, SKIP = 96, 32
READING = Reading(context=CONTEXT, skip=SKIP, threads=1, gpu_layers=0)
RUNTIME = Runtime(threads=1, n_gpu_layers=0)


@dataclass(frozen=True)
class Files:
    reference: Path
    other: Path
    text: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Two models with the same vocabulary and different weights, and a text of a little over four chunks."""
    folder = tmp_path_factory.mktemp("perplexity")
    for seed, name in enumerate(("one", "two")):
        source = write_checkpoint(folder / name, layers=4, mtp=False, seed=seed)
        flags = ["--src", source, "--out", folder, "--quant", "F32", "--outtype", "F32"]
        assert convert([str(flag) for flag in flags]) == 0
    text = folder / "text.txt"
    text.write_text("".join(f"{n} is the other. " for n in range(38)), encoding="utf-8")
    return Files(folder / "one-F32.gguf", folder / "two-F32.gguf", text)


@pytest.fixture(scope="module")
def measured(files: Files) -> Measured:
    return measure(files.other, files.reference, files.text, READING)


def test_against_figures_by_hand(files: Files, measured: Measured) -> None:
    with RUNTIME.load(files.reference) as model:
        chunks = read_chunks(model, files.text, CONTEXT)
    assert measured.about["chunks"] == len(chunks)
    assert measured.values["scored_tokens"] == len(chunks) * (CONTEXT - SKIP - 1)
    assert len(chunks) == 4
    scored = np.arange(SKIP, CONTEXT - 1)
    p, q = (
        gguf_log_probabilities(path, chunks, scored).astype(np.float64)
        for path in (files.reference, files.other)
    )
    following = chunks[:, SKIP + 1 :, None]
    losses = [-np.take_along_axis(logs, following, axis=2) for logs in (p, q)]
    divergence = (np.exp(p) * (p - q)).sum(axis=2)
    near: dict[str, Any] = {"rel": 0.01}
    assert measured.values["reference_perplexity"] == pytest.approx(np.exp(losses[0].mean()), **near)
    assert measured.values["perplexity"] == pytest.approx(np.exp(losses[1].mean()), **near)
    assert measured.values["log_ratio"] == pytest.approx(float((losses[1] - losses[0]).mean()), rel=0.05)
    assert measured.values["kld_mean"] == pytest.approx(divergence.mean(), **near)
    assert measured.values["kld_p99"] == pytest.approx(np.quantile(divergence, 0.99), **near)
    assert measured.values["kld_max"] == pytest.approx(divergence.max(), **near)
    same = (p.argmax(axis=2) == q.argmax(axis=2)).mean()
    assert measured.values["same_top"] == pytest.approx(100 * same, abs=2)


def test_of_a_file_with_itself(files: Files) -> None:
    result = measure(files.other, files.other, files.text, READING)
    found = result.values
    assert (found["kld_mean"], found["kld_max"], found["same_top"]) == (0, 0, 100)
    assert (found["log_ratio"], found["log_ratio_error"]) == (0, 0)
    assert found["perplexity"] == found["reference_perplexity"]
    assert found["dropped"] == 0


@pytest.mark.parametrize("tokens", [7, 50, 300], ids=["parts of a chunk", "half a chunk", "three chunks"])
def test_no_batching_changes_it(
    files: Files, measured: Measured, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kld, "LOGIT_BYTES", tokens * 320 * 4)  # the same bound for a far larger vocabulary
    result = measure(files.other, files.reference, files.text, READING)
    assert result.values["scored_tokens"] == measured.values["scored_tokens"]
    assert result.values["kld_mean"] == pytest.approx(measured.values["kld_mean"], rel=1e-3)
    assert result.values["perplexity"] == pytest.approx(measured.values["perplexity"], rel=1e-3)


def test_a_model_of_fewer_tokens_is_read_in_its_own(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = files.reference.with_name("one")
    flags = ["--quant", "F32", "--outtype", "F32", "--keep-vocab", "257", "--no-kld", "--threads", "1"]
    assert convert(["--src", str(source), "--out", str(tmp_path), *flags]) == 0
    pruned = tmp_path / "one-v257-F32.gguf"
    result = measure(pruned, files.reference, files.text, READING)
    here, there = (result.about[name] for name in ("text_tokens", "reference_text_tokens"))
    assert here > there  # "the" is gone
    assert result.values["kld_max"] < 1e-4  # the same weights, over what both have
    assert 0 < result.values["dropped"] < 100
    assert result.values["perplexity"] < result.values["reference_perplexity"]
    options = ["--context", CONTEXT, "--skip", SKIP, "--threads", 1, "--out", tmp_path / "store"]
    assert command(pruned, files.reference, files.text, *options) == 0
    shown = capsys.readouterr().out
    assert f"the text is {here:,} tokens here, {there:,} there" in shown
    assert f"gives {result.values['dropped']:.4f}% to tokens that the model does not have" in shown


def test_an_error_is_the_spread_between_chunks() -> None:
    found = estimate(np.array([[1.0, 3.0], [4.0, 4.0], [5.0, 7.0]]))
    assert found.value == 4.0
    assert found.error == pytest.approx(2 / math.sqrt(3))
    assert estimate(np.array([[1.0, 2.0]])).error is None


def test_the_command(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--context", CONTEXT, "--threads", 1, "--gpu-layers", 0, "--out", tmp_path]
    assert command(files.other, files.reference, files.text, *flags) == 0
    results = load([tmp_path])
    (manifest,) = results.manifests.values()
    assert manifest.settings == {"context": CONTEXT, "skip": CONTEXT // 2, "text": "text.txt"}
    about = manifest.subjects["two-F32.gguf"]
    assert (about["reference"], about["chunks"]) == ("one-F32.gguf", 4)
    assert set(results.of(workload=WORKLOAD)["cell"]) == {"positions 48 to 94 of 96"}, "what means are over"
    assert set(results.frame["workload"]) == {WORKLOAD}
    shown = capsys.readouterr()
    (mean,) = results.of(metric="kld_mean")["value"]
    assert f"{mean:.5f}" in shown.out
    assert "two-F32.gguf against one-F32.gguf" in shown.out and "positions 48 to 94 of 96" in shown.out
    assert "tokens: the 99% quantile rests on a handful" in shown.out
    assert "KL divergence: done, 384 tokens" in shown.err


def test_files_that_will_not_do(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: object) -> str:
        assert command(*arguments, "--threads", 1, "--out", tmp_path / "store") == 1
        return capsys.readouterr().err

    text = files.text
    (no_gguf := tmp_path / "no.gguf").write_text("once upon a time")
    assert f"error: {no_gguf} is not a GGUF file" in error(no_gguf, files.reference, text)
    missing = tmp_path / "none.gguf"
    assert f"error: {missing} does not exist" in error(files.other, missing, text)
    assert f"error: {missing}: no such file" in error(files.other, files.reference, missing)
    (short := tmp_path / "short.txt").write_text("too short")
    assert "tokens; at least one chunk of 512 is needed" in error(files.other, files.reference, short)
    (binary := tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in error(files.other, files.reference, binary)
    with pytest.raises(BenchError, match=r"--skip 95: leaves nothing of a chunk of 96"):
        measure(files.other, files.reference, text, Reading(context=96, skip=95))


def test_another_vocabulary_is_refused(
    files: Files, nano_f16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(nano_f16, files.reference, files.text, "--threads", 1, "--out", tmp_path) == 1
    message = capsys.readouterr().err
    assert f"error: {nano_f16}: not made from {files.reference}: the vocabularies differ (3712 and" in message


def command(gguf: object, reference: object, text: object, *flags: object) -> int:
    """The command's exit status."""
    arguments = [gguf, "--reference", reference, "--text", text, *flags]
    return main(["quality", "perplexity", *map(str, arguments)])
