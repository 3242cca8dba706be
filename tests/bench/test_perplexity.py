"""Perplexity and divergence of tiny random models, against log-probabilities kept and compared in full."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import perplexity as verb
from bench.errors import BenchError
from bench.options import run
from bench.perplexity import Settings, estimate, measure
from bench.perplexity_result import PerplexityResult, tables
from convert import kld
from convert.chunks import read_chunks
from convert.cli import main as convert
from convert.llama import Model, Runtime
from tests.checkpoints import write_checkpoint
from tests.logits import gguf_log_probabilities

import numpy as np  # isort: skip  (after llama_cpp: see convert/llama/bindings.py)

CONTEXT, SKIP = 96, 32
SETTINGS = Settings(context=CONTEXT, skip=SKIP, threads=1, gpu_layers=0)
RUNTIME = Runtime(threads=1, n_gpu_layers=0)


@dataclass(frozen=True)
class Files:
    reference: Path
    other: Path
    text: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Two models with other weights and the same vocabulary, and a text of four chunks and a bit."""
    folder = tmp_path_factory.mktemp("perplexity")
    for seed, name in enumerate(("one", "two")):
        source = write_checkpoint(folder / name, layers=4, mtp=False, seed=seed)
        flags = ["--src", source, "--out", folder, "--quant", "F32", "--outtype", "F32"]
        assert convert([str(flag) for flag in flags]) == 0
    text = folder / "text.txt"
    text.write_text("".join(f"{n} is the other. " for n in range(38)), encoding="utf-8")
    return Files(folder / "one-F32.gguf", folder / "two-F32.gguf", text)


@pytest.fixture(scope="module")
def measured(files: Files) -> PerplexityResult:
    return measure(files.other, files.reference, files.text, SETTINGS)


def test_against_figures_by_hand(files: Files, measured: PerplexityResult) -> None:
    with Model(files.reference, RUNTIME) as model:
        chunks = read_chunks(model, files.text, CONTEXT)
    assert (measured.chunks, measured.tokens) == (len(chunks), len(chunks) * (CONTEXT - SKIP - 1))
    assert len(chunks) == 4
    scored = np.arange(SKIP, CONTEXT - 1)
    p, q = (
        gguf_log_probabilities(path, chunks, scored).astype(np.float64)
        for path in (files.reference, files.other)
    )
    following = chunks[:, SKIP + 1 :, None]
    losses = [-np.take_along_axis(logs, following, axis=2) for logs in (p, q)]
    divergence = (np.exp(p) * (p - q)).sum(axis=2)
    near = {"rel": 0.01}
    assert measured.reference_perplexity.value == pytest.approx(np.exp(losses[0].mean()), **near)
    assert measured.perplexity.value == pytest.approx(np.exp(losses[1].mean()), **near)
    assert measured.log_ratio.value == pytest.approx(float((losses[1] - losses[0]).mean()), rel=0.05)
    assert measured.kld.mean.value == pytest.approx(divergence.mean(), **near)
    assert measured.kld.p99 == pytest.approx(np.quantile(divergence, 0.99), **near)
    assert measured.kld.maximum == pytest.approx(divergence.max(), **near)
    same = (p.argmax(axis=2) == q.argmax(axis=2)).mean()
    assert measured.same_top.value == pytest.approx(same, abs=0.02)
    assert sum(measured.histogram.counts) + measured.histogram.zero == measured.tokens


def test_of_a_file_with_itself(files: Files) -> None:
    result = measure(files.other, files.other, files.text, SETTINGS)
    assert (result.kld.mean.value, result.kld.maximum, result.same_top.value) == (0, 0, 1)
    assert (result.log_ratio.value, result.log_ratio.error) == (0, 0)
    assert result.perplexity == result.reference_perplexity
    assert (result.histogram.zero, result.dropped) == (result.tokens, 0)


@pytest.mark.parametrize("tokens", [7, 50, 300], ids=["parts of a chunk", "half a chunk", "three chunks"])
def test_no_batching_changes_it(
    files: Files, measured: PerplexityResult, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kld, "LOGIT_BYTES", tokens * 320 * 4)  # the same bound for a far larger vocabulary
    result = measure(files.other, files.reference, files.text, SETTINGS)
    assert result.tokens == measured.tokens
    assert result.kld.mean.value == pytest.approx(measured.kld.mean.value, rel=1e-3)
    assert result.perplexity.value == pytest.approx(measured.perplexity.value, rel=1e-3)


def test_a_model_of_fewer_tokens_is_read_in_its_own(files: Files, tmp_path: Path) -> None:
    source = files.reference.with_name("one")
    flags = ["--quant", "F32", "--outtype", "F32", "--keep-vocab", "257", "--no-kld", "--threads", "1"]
    assert convert(["--src", str(source), "--out", str(tmp_path), *flags]) == 0
    result = measure(tmp_path / "one-v257-F32.gguf", files.reference, files.text, SETTINGS)
    assert result.text_tokens > result.reference_text_tokens  # "the" is gone
    assert result.kld.maximum < 1e-4  # the same weights, over what both have
    assert 0 < result.dropped < 1
    assert result.perplexity.value < result.reference_perplexity.value
    shown = str(tables(result)[0])
    assert f"the text is {result.text_tokens} tokens here, {result.reference_text_tokens} there" in shown
    assert f"gives {100 * result.dropped:.4f}% to tokens that the model does not have" in shown


def test_an_error_is_the_spread_between_chunks() -> None:
    found = estimate(np.array([[1.0, 3.0], [4.0, 4.0], [5.0, 7.0]]))
    assert found.value == 4.0
    assert found.error == pytest.approx(2 / math.sqrt(3))
    assert estimate(np.array([[1.0, 2.0]])).error is None


def test_the_command(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    flags = ["--context", CONTEXT, "--threads", 1, "--gpu-layers", 0, "--out", out]
    assert verdict(files.other, files.reference, files.text, *flags) == 0
    result = PerplexityResult.load(out)
    assert (result.model, result.reference, result.skip) == (
        "two-F32.gguf",
        "one-F32.gguf",
        CONTEXT // 2,
    )
    shown = capsys.readouterr()
    assert str(tables(result)[0]) in shown.out
    assert f"{result.kld.mean.value:.5f}" in shown.out
    assert "tokens: the 99% quantile rests on a handful" in shown.out
    assert "KL divergence: done, 384 tokens" in shown.err
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_files_that_will_not_do(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: object) -> str:
        assert verdict(*arguments, "--threads", 1) == 1
        return capsys.readouterr().err

    text = files.text
    (no_gguf := tmp_path / "no.gguf").write_text("once upon a time")
    assert f"error: {no_gguf}: not a whole GGUF file" in error(no_gguf, files.reference, text)
    missing = tmp_path / "none.gguf"
    assert f"error: {missing}: cannot be read: No such file" in error(files.other, missing, text)
    assert f"error: {missing}: no such file" in error(files.other, files.reference, missing)
    (short := tmp_path / "short.txt").write_text("too short")
    assert "tokens; at least one chunk of 512 is needed" in error(files.other, files.reference, short)
    (binary := tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in error(files.other, files.reference, binary)
    with pytest.raises(BenchError, match=r"--skip 95: leaves nothing of a chunk of 96"):
        measure(files.other, files.reference, text, Settings(context=96, skip=95))


def test_another_vocabulary_is_refused(
    files: Files, nano_f16: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verdict(nano_f16, files.reference, files.text, "--threads", 1) == 1
    message = capsys.readouterr().err
    assert f"error: {nano_f16}: not made from {files.reference}: the vocabularies differ (3712 and" in message


def verdict(gguf: object, reference: object, text: object, *flags: object) -> int:
    """The command's exit status."""
    arguments = [gguf, "--reference", reference, "--text", text, *flags]
    return run(verb.parser(), verb.perplexity, [str(argument) for argument in arguments])
