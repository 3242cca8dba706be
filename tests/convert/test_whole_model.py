"""A GGUF in place of a checkpoint gives the same files; unsuitable GGUFs are refused with the reason."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from qwen_serve.convert.cli import main
from qwen_serve.convert.whole_model import UnquantizedFile
from tests.checkpoints import EXPERTS_USED, write_checkpoint
from tests.conftest import QUICK as NANO_QUICK
from tests.convert.test_pipeline import QUICK, times

NAME = "Random-1B"


def run(source: Path, out: Path, *flags: object) -> int:
    return main([str(flag) for flag in ("--src", source, "--out", out, "--threads", 1, *flags)])


@pytest.fixture
def whole(checkpoint: Path, tmp_path: Path) -> Path:
    """A file of nobody's: no record lies beside it."""
    assert run(checkpoint, tmp_path / "made", "--quant", "F16") == 0
    return (tmp_path / "made" / f"{NAME}-F16.gguf").rename(tmp_path / f"{NAME}-F16.gguf")


def test_nano_comes_out_the_same_from_its_checkpoint_and_its_gguf(
    nano_f16: Path, nano_q4_k_m: Path, tmp_path: Path
) -> None:
    before = nano_f16.stat()
    assert run(nano_f16, tmp_path, "--quant", "Q4_K_M", *NANO_QUICK) == 0
    assert (tmp_path / "nano-Q4_K_M.gguf").read_bytes() == nano_q4_k_m.read_bytes()
    assert not list(tmp_path.glob("*F16*"))
    assert nano_f16.stat().st_mtime_ns == before.st_mtime_ns


def test_it_goes_on_from_what_was_made_of_the_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(checkpoint, out, "--quant", "Q8_0", *QUICK) == 0
    before = times(out)
    assert run(out / f"{NAME}-F16.gguf", out, "--quant", "Q8_0,F16", *QUICK) == 0
    after = times(out)
    assert after.keys() - before.keys() == {f"{NAME}-F16.json"}
    assert all(after[name] == before[name] for name in before if name.endswith(".gguf"))
    shown = capsys.readouterr().out
    assert f"python -m qwen_serve.server --model {out}/{NAME}-F16.gguf\n" in shown
    assert run(checkpoint, out, "--quant", "F16,Q8_0", *QUICK) == 0
    assert all(times(out)[name] == before[name] for name in before if name.endswith(".gguf"))


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_a_weight_that_is_not_finite_is_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    assert run(checkpoint, tmp_path, "--quant", kind) == 0
    path = tmp_path / f"{NAME}-{kind}.gguf"
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.2.ffn_up.weight")
    size = tensor.n_bytes // tensor.n_elements
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset) + tensor.n_bytes - size)
        file.write(b"\xff" * size)
    capsys.readouterr()
    assert run(path, tmp_path / "out", "--quant", "Q8_0", *QUICK) == 1
    assert f"error: {path}: tensor blk.2.ffn_up.weight holds nan, and every" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.gguf"))


def test_weights_are_read_once(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for expected in (1, 0):
        capsys.readouterr()
        assert run(whole, tmp_path / "out", "--quant", "Q8_0,Q6_K", *QUICK) == 0
        assert capsys.readouterr().err.count(f"Checking {whole.name}: done") == expected


def test_a_file_that_ends_early_is_named(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole.write_bytes(whole.read_bytes()[:-5000])
    assert run(whole, tmp_path / "out", "--quant", "Q8_0", *QUICK) == 1
    assert "bytes of weights are missing; copy it again" in capsys.readouterr().err


def test_what_it_is_made_from_is_the_content(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(whole, out, "--quant", "Q8_0", *QUICK) == 0
    before = times(out)
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(whole, copy)
    assert run(copy, out, "--quant", "Q8_0", "--name", NAME, *QUICK) == 0
    assert times(out)[f"{NAME}-Q8_0.gguf"] == before[f"{NAME}-Q8_0.gguf"]
    data = bytearray(whole.read_bytes())
    data[-64:-62] = b"\x00\x3c"
    whole.write_bytes(data)
    assert run(whole, out, "--quant", "Q8_0", *QUICK) == 0
    assert all(times(out)[name] != before[name] for name in before)


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_type_and_experts_are_its_own(tmp_path: Path, kind: str) -> None:
    source = write_checkpoint(tmp_path / "Random-MoE", layers=4, experts="fused")
    assert run(source, tmp_path, "--quant", kind) == 0
    model = UnquantizedFile.open(tmp_path / f"Random-MoE-{kind}.gguf")
    assert (model.type, model.used_experts) == (kind, EXPERTS_USED)
    assert run(model.path, tmp_path / "out", "--quant", "Q8_0", *QUICK) == 0
    assert (tmp_path / "out" / "Random-MoE-Q8_0.gguf").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--keep-vocab", 257], "--keep-vocab, and recipes that prune, are for checkpoints"),
        (["--recipe", "short.toml"], "--keep-vocab, and recipes that prune, are for checkpoints"),
        (["--outtype", "BF16"], "is F16; want the checkpoint for BF16"),
        (["--quant", "BF16,F16,F32"], "is F16; want the checkpoint for BF16, F32"),
        (["--target", "some/model"], "--target is for block drafters, and "),
        (["--revision", "main"], "--revision main: is for hub ids, and "),
        (["--recipe", "F16.toml", "--out", ""], "would be written to; give another --out or --name"),
    ],
)
def test_flags_that_it_cannot_keep_are_refused(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    for name, layers in (("short", "[0, 1, 2, 3]"), ("F16", "[]")):
        recipe = f'type = "Q8_0"\nabout = "a test"\n[layers]\nprune = {layers}\n'
        (tmp_path / f"{name}.toml").write_text(recipe)
    wanted = [tmp_path / flag if flag in ("", "short.toml", "F16.toml") else flag for flag in flags]
    before = whole.read_bytes()
    assert run(whole, tmp_path / "out", *wanted) == 1
    error = capsys.readouterr().err
    assert message in error
    assert str(whole) in error
    assert whole.read_bytes() == before
    assert not list(tmp_path.glob("out/*"))


def written(path: Path, *, arch: str = "qwen35", kind: Type = Type.F16, **keys: Any) -> Path:
    """A file of one tensor, the embedding, and a tokenizer of one token unless `keys` say otherwise."""
    writer = gguf.GGUFWriter(path, arch)
    if keys.get("tokens", True):
        writer.add_token_list(["a"])
    if "split" in keys:
        writer.add_uint16("split.count", keys["split"])
    data = np.zeros((32, 32), np.float16) if kind == Type.F16 else np.zeros((32, 34), np.uint8)
    writer.add_tensor(keys.get("tensor", "token_embd.weight"), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"kind": Type.Q8_0}, "tensor token_embd.weight is Q8_0; want a file of F16, BF16 or F32"),
        ({"arch": "llama"}, "general.architecture is llama; want qwen35 or qwen35moe"),
        ({"arch": "dflash"}, "a block drafter; they are made from checkpoints, with --target"),
        ({"tokens": False}, "no tokenizer (tokenizer.ggml.tokens)"),
        ({"split": 3}, "one of 3 parts of a file; join them with llama-gguf-split --merge"),
        ({"tensor": "blk.0.attn_q.weight"}, "no tensor token_embd.weight: not a whole model"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: dict[str, Any], message: str
) -> None:
    path = written(tmp_path / "x.gguf", **made)
    assert run(path, tmp_path / "out", "--quant", "Q8_0") == 1
    assert f"--src {path}: {message}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_no_gguf_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    assert run(tmp_path / "model.safetensors", tmp_path / "out") == 1
    assert "model.safetensors is not a GGUF file (it starts with" in capsys.readouterr().err
    assert run(tmp_path / "typo.gguf", tmp_path / "out") == 1
    assert "typo.gguf: no such file or folder" in capsys.readouterr().err


def test_a_drafter_is_not_converted_with_a_gguf_as_its_target(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = Path(__file__).parents[2] / "models" / "nano-dflash"
    assert run(drafter, tmp_path / "out", "--target", whole) == 1
    assert f"--target {whole}: is a file; want the checkpoint that it drafts for" in capsys.readouterr().err
