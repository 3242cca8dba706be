"""The importance matrix equals llama-imatrix's, and each program reads the other's file."""

from pathlib import Path

import pytest

from qwen_serve.bench.servers.builds import build_programs
from qwen_serve.convert.calibration.prompts import PROMPTS
from qwen_serve.convert.imatrix import Imatrix, collect_imatrix
from qwen_serve.llamacpp.evaluation import Runtime

import numpy as np  # isort: skip
from tests.processes import run as run_program

pytestmark = pytest.mark.reference

RUNTIME = Runtime(threads=1, n_gpu_layers=0)
FLAGS = ["-c", 512, "--parse-special", "--no-ppl", "-t", 1, "-ngl", 0, "--no-repack"]
"""Stock llama.cpp is wrong with weights that are repacked for AMX."""


@pytest.fixture(scope="module")
def tools() -> Path:
    return build_programs(["llama-imatrix", "llama-quantize"], patched=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, nano_f16: Path) -> Path:
    """text.txt, a dozen chunks with special tokens in it, and ours.gguf collected from it."""
    folder = tmp_path_factory.mktemp("imatrix")
    prose = PROMPTS.read_text(encoding="utf-8").split("\n\n")
    turns = [f"<|im_start|>user\n{part}<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n" for part in prose]
    (folder / "text.txt").write_text("".join(turns), encoding="utf-8")
    collect_imatrix(nano_f16, folder / "ours.gguf", text=folder / "text.txt", runtime=RUNTIME)
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Imatrix:
    return Imatrix.load(folder / "ours.gguf")


@pytest.fixture(scope="module")
def theirs(folder: Path, tools: Path, nano_f16: Path) -> Imatrix:
    run(
        [tools / "llama-imatrix", "-m", nano_f16, "-f", "text.txt", "-o", "theirs.gguf", *FLAGS],
        folder,
    )
    return Imatrix.load(folder / "theirs.gguf")


def test_chunks_are_cut_alike(ours: Imatrix, theirs: Imatrix) -> None:
    assert ours.chunk_count >= 10
    assert (ours.chunk_count, ours.chunk_size, ours.datasets) == (
        theirs.chunk_count,
        theirs.chunk_size,
        theirs.datasets,
    )


def test_values_agree_within_one_percent(ours: Imatrix, theirs: Imatrix) -> None:
    assert len(theirs.entries) >= 50
    for name, entry in theirs.entries.items():
        np.testing.assert_array_equal(ours.entries[name].counts, entry.counts, err_msg=name)
        np.testing.assert_allclose(ours.entries[name].sums, entry.sums, rtol=0.01, err_msg=name)


def test_ours_has_the_head_and_the_mtp_block_besides(nano_f16: Path, ours: Imatrix, theirs: Imatrix) -> None:
    with RUNTIME.load(nano_f16) as model:
        block = f"blk.{model.n_layer}."
    extra = ours.entries.keys() - theirs.entries.keys()
    assert theirs.entries.keys() <= ours.entries.keys()
    assert {name for name in extra if not name.startswith(block)} == {"token_embd.weight"}
    assert f"{block}nextn.eh_proj.weight" in extra


def test_llama_imatrix_reads_ours(folder: Path, tools: Path, nano_f16: Path, ours: Imatrix) -> None:
    """Combining our file with itself doubles every sum and count."""
    run(
        [tools / "llama-imatrix", "-m", nano_f16, *2 * ["--in-file", "ours.gguf"], "-o", "sum.gguf"],
        folder,
    )
    doubled = Imatrix.load(folder / "sum.gguf")
    assert doubled.entries.keys() == ours.entries.keys()
    for name, entry in ours.entries.items():
        np.testing.assert_allclose(doubled.entries[name].sums, 2 * entry.sums, rtol=1e-6)
        np.testing.assert_array_equal(doubled.entries[name].counts, 2 * entry.counts)


def test_llama_quantize_reads_ours(folder: Path, tools: Path, nano_f16: Path, ours: Imatrix) -> None:
    command = [tools / "llama-quantize", "--imatrix", "ours.gguf", nano_f16, "q.gguf", "Q4_K_S", 1]
    out = run(command, folder)
    assert f"loaded {len(ours.entries)} importance matrix entries from ours.gguf" in out
    assert "did not find weights" not in out


def test_experts_are_counted_and_summed_alike(
    nano_moe_q4_k_m: Path, folder: Path, tools: Path, tmp_path: Path
) -> None:
    model = nano_moe_q4_k_m.with_name("nano-moe-F16.gguf")
    collect_imatrix(model, tmp_path / "ours.gguf", text=folder / "text.txt", runtime=RUNTIME)
    run(
        [tools / "llama-imatrix", "-m", model, "-f", folder / "text.txt", "-o", "theirs.gguf", *FLAGS],
        tmp_path,
    )
    ours, theirs = Imatrix.load(tmp_path / "ours.gguf"), Imatrix.load(tmp_path / "theirs.gguf")
    assert theirs.entries.keys() <= ours.entries.keys()
    experts = [name for name in theirs.entries if "_exps" in name]
    assert len(experts) == 3 * 8
    for name, entry in theirs.entries.items():
        # a batch of another size may move a row to another expert where two are all but equal
        np.testing.assert_allclose(ours.entries[name].counts, entry.counts, rtol=0.01, atol=2, err_msg=name)
        np.testing.assert_allclose(ours.entries[name].means, entry.means, rtol=0.03, err_msg=name)


def run(command: list[object], folder: Path) -> str:
    done = run_program([*map(str, command)], cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr
