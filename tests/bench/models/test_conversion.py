"""The conversion benchmark: its made-up checkpoint is a real one, and its comparison sees a difference."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from bench.conversion import NANO, Program, anonymous_bytes, compare, convert
from bench.models.checkpoint import qwen35_4b, write_checkpoint
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
    assert watched.seconds > 0.3
    assert watched.rss_bytes > 100_000_000
    assert watched.anonymous_bytes > 100_000_000
    assert anonymous_bytes(os.getpid()) > 0


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
