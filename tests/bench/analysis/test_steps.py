"""Decode steps side by side: the bytes are the file's own, the times are what the program says."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from bench import steps as verb
from bench.options import run
from bench.steps import StepsResult, describe, tables

WIDTH, TOKENS = 256, 40
PROGRAM = """\
#!{python}
# steps of sequences milliseconds, twice that for a file called slow
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "broken" in flags["-m"]:
    sys.exit("cannot load")
factor = 0.002 if "slow" in flags["-m"] else 0.001
for sequences in map(int, flags["-npl"].split(",")):
    steps = int(flags["-ntg"])
    row = {{"pp": int(flags["-npp"]), "tg": steps, "pl": sequences}}
    row |= {{"t_pp": 1, "t_tg": factor * sequences * steps}}
    print(json.dumps(row))
"""


def write_model(path: Path, *, tied: bool = True, mtp: bool = True) -> None:
    """A file of two blocks, the second one for drafts where ``mtp``; no model that runs."""
    writer = GGUFWriter(path, "qwen35")
    rows = np.zeros((TOKENS, WIDTH), np.float32)
    kind = GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", quantize(rows, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.zeros(WIDTH, np.float32))
    if not tied:
        writer.add_tensor("output.weight", rows.astype(np.float16))
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((8, WIDTH), np.float16))
    if mtp:
        writer.add_tensor("blk.1.nextn.eh_proj.weight", np.zeros((4, WIDTH), np.float16))
        writer.add_tensor("blk.1.ffn_up.weight", np.zeros((2, WIDTH), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def binaries(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "llama-batched-bench"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return folder


def command(*arguments: object) -> int:
    return run(verb.parser(), verb.steps, [str(argument) for argument in arguments])


def test_bytes_of_a_step_and_of_a_draft(tmp_path: Path) -> None:
    q8_row = WIDTH // 32 * 34
    for tied in (True, False):
        write_model(tmp_path / "m.gguf", tied=tied)
        one = describe(tmp_path / "m.gguf")
        head = TOKENS * q8_row if tied else 2 * TOKENS * WIDTH
        assert (one.head_type, one.head_bytes) == ("Q8_0" if tied else "F16", head)
        assert one.step_bytes == head + 2 * 8 * WIDTH + 4 * WIDTH
        assert one.draft_bytes == head + 2 * 6 * WIDTH
    write_model(tmp_path / "m.gguf", mtp=False)
    assert describe(tmp_path / "m.gguf").draft_bytes is None


def test_files_take_turns(tmp_path: Path, binaries: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "fast.gguf", tmp_path / "slow.gguf"]
    for path in files:
        write_model(path)
    out = tmp_path / "steps.json"
    flags = ["--binaries", binaries, "--sequences", "1,8", "--rounds", 3, "--output-tokens", 5, "--out", out]
    assert command(*files, *flags, "--card", "a card") == 0
    result = StepsResult.load(out)
    assert [one.file for one in result.files] == ["fast.gguf", "slow.gguf"]
    for one, factor in zip(result.files, (1, 2), strict=True):
        assert [step.sequences for step in one.steps] == [1, 8]
        assert [step.seconds for step in one.steps] == pytest.approx([factor * 0.001, factor * 0.008])
        assert [len(step.rounds) for step in one.steps] == [3, 3]
    (table,) = tables(result)
    assert str(table) in capsys.readouterr().out
    assert "+100.0%" in str(table)
    assert "a card" in str(table)
    assert json.loads(out.read_text())["kind"] == "steps"
    assert out.with_suffix(".png").is_file()


def test_what_cannot_be_measured(tmp_path: Path, binaries: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, broken, text = tmp_path / "m.gguf", tmp_path / "broken.gguf", tmp_path / "text.gguf"
    write_model(good)
    write_model(broken)
    text.write_text("no model")
    for arguments, message in (
        ([text, "--binaries", binaries], f"error: {text}: not a whole GGUF file"),
        ([tmp_path / "none.gguf", "--binaries", binaries], "none.gguf: cannot be read: No such file"),
        ([good, "--binaries", tmp_path], "error: --binaries: cannot run"),
        ([good, good, "--binaries", binaries], "error: two files have one name"),
        ([broken, "--binaries", binaries], "failed:\ncannot load"),
    ):
        assert command(*arguments, "--rounds", 1) == 1
        assert message in capsys.readouterr().err
