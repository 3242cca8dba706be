"""The conversion benchmark: its made-up checkpoint is a real one, and its comparison sees a difference."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from bench.cli import main
from bench.models import conversion
from bench.models.checkpoint import qwen35_4b, write_checkpoint
from bench.models.conversion import Program, anonymous_bytes, compare, convert, in_turns
from bench.models.vocab import NANO
from bench.store import Run, load
from convert.checkpoint import Checkpoint
from convert.tensors import plan_tensors
from convert.vocab import Vocab


def test_the_made_up_checkpoint_is_complete(tmp_path: Path) -> None:
    config = qwen35_4b()
    small = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 4000}
    config["text_config"] |= small | {"layer_types": config["text_config"]["layer_types"][:4]}
    size = write_checkpoint(tmp_path, config, NANO)
    checkpoint = Checkpoint.open(tmp_path)
    planned = plan_tensors(checkpoint, "BF16", (0, 1, 2, 3))
    assert sum(tensor.nbytes for tensor in checkpoint.tensors.values()) == size
    assert len(planned.tensors) == len(checkpoint.tensors)
    vocab = Vocab.load(tmp_path, checkpoint.config)
    assert len(set(vocab.tokens)) == 4000
    assert "<|im_end|>" in vocab.tokens


def test_a_run_is_watched(tmp_path: Path) -> None:
    output = tmp_path / "out"
    steps = ["import pathlib, time", "held = bytearray(100_000_000)", "time.sleep(0.3)"]
    code = "; ".join([*steps, f"pathlib.Path({str(output)!r}).touch()"])
    watched = convert(Program("a program", output, ["-c", code]))
    assert watched["conversion_time"] > 0.3
    assert watched["peak_rss"] > 0.1
    assert watched["peak_anonymous"] > 0.1
    assert anonymous_bytes(os.getpid()) > 0


def test_programs_take_turns_and_each_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(program: Program) -> dict[str, float]:
        order.append(program.name)
        return {"conversion_time": 2.0, "peak_rss": 0.5}

    monkeypatch.setattr(conversion, "convert", note)
    programs = [Program(name, tmp_path / name / "out", []) for name in ("a", "b")]
    with Run.begin(tmp_path / "store", "conversion", settings={}, local=False) as run:
        in_turns(run, programs, 2)
    assert order == ["b", "a", "a", "b"]
    times = load([tmp_path / "store"]).of(metric="conversion_time")
    assert times.groupby("subject")["round"].apply(list).to_dict() == {"a": [1, 2], "b": [1, 2]}


def test_missing_sources_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conversion", "--llama-cpp", str(tmp_path), "--out", str(tmp_path / "store")]) == 1
    assert f"error: --llama-cpp {tmp_path}: has no convert_hf_to_gguf.py" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_the_comparison_names_what_differs(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    files = []
    for name, second in (("a", values), ("b", values + np.float32(1))):
        files.append(tmp_path / name)
        writer = GGUFWriter(files[-1], "qwen35")
        writer.add_tensor("same", values)
        writer.add_tensor("other", second)
        writer.add_tensor(f"only-in-{name}", values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert compare(*files) == (1, ["other", "only-in-a", "only-in-b"])
