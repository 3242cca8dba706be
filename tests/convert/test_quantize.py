"""Quantizing a file: types by recipe, provenance, and no files left by failures or interrupts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader

from qwen_serve.convert.imatrix import Entry, Imatrix
from qwen_serve.convert.quantize import QuantizeError, quantize
from qwen_serve.convert.recipes import Recipe, load_recipe
from qwen_serve.llamacpp.evaluation import Runtime

import numpy as np  # isort: skip
from tests.processes import group_runs
from tests.waiting import wait_until

RUNTIME = Runtime(threads=1, n_gpu_layers=0)
ROOT = Path(__file__).parents[2]


def test_types_and_overrides(nano_f16: Path, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "type": "Q4_K_S",
            "about": "test",
            "override": [
                {"pattern": r"blk\.0\.ffn_up", "type": "Q8_0", "reason": "test"},
                {"pattern": "ffn_up", "type": "Q5_K", "reason": "the first that matches decides"},
            ],
        }
    )
    quantize(nano_f16, tmp_path / "q.gguf", recipe=recipe, imatrix=None, runtime=RUNTIME)
    reader = GGUFReader(tmp_path / "q.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.ffn_up.weight"] == "Q8_0"
    assert types["blk.1.ffn_up.weight"] == "Q5_K"
    assert types["blk.1.ffn_gate.weight"] == "Q4_K"
    assert types["token_embd.weight"] == "Q6_K"
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert reader.get_field("general.file_type").contents() == recipe.file_type
    with RUNTIME.load(tmp_path / "q.gguf") as model:
        assert model.n_nextn == 1


def test_an_imatrix_changes_the_bytes_and_is_on_record(nano_f16: Path, tmp_path: Path) -> None:
    recipe = load_recipe("Q2_K")
    rng = np.random.default_rng(0)
    entries = {
        tensor.name: Entry(rng.random((1, int(tensor.shape[0])), np.float32) ** 4, np.ones(1, np.float32))
        for tensor in GGUFReader(nano_f16).tensors
        if len(tensor.shape) == 2
    }
    Imatrix(entries, ("made-up.txt",), 3, 512).save(tmp_path / "i.gguf")
    quantize(nano_f16, tmp_path / "with.gguf", recipe=recipe, imatrix=tmp_path / "i.gguf", runtime=RUNTIME)
    quantize(nano_f16, tmp_path / "without.gguf", recipe=recipe, imatrix=None, runtime=RUNTIME)
    with_, without = GGUFReader(tmp_path / "with.gguf"), GGUFReader(tmp_path / "without.gguf")
    keys = {"file": "i.gguf", "dataset": "made-up.txt", "entries_count": len(entries), "chunks_count": 3}
    assert {key: with_.get_field(f"quantize.imatrix.{key}").contents() for key in keys} == keys
    assert without.get_field("quantize.imatrix.file") is None
    data = [{t.name: t.data for t in reader.tensors} for reader in (with_, without)]
    assert not np.array_equal(data[0]["blk.0.ffn_up.weight"], data[1]["blk.0.ffn_up.weight"])
    assert not np.array_equal(data[0]["blk.8.nextn.eh_proj.weight"], data[1]["blk.8.nextn.eh_proj.weight"])


def test_failure_says_why_and_leaves_no_file(nano_f16: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(nano_f16.read_bytes()[:1_000_000])
    with pytest.raises(QuantizeError, match=r"llama\.cpp cannot quantize .*broken\.gguf to .*: \S"):
        quantize(broken, tmp_path / "q.gguf", recipe=load_recipe("Q4_K_M"), imatrix=None, runtime=RUNTIME)
    assert not (tmp_path / "q.gguf").exists()


SLOW = """
import os, sys, time
from pathlib import Path
import qwen_serve.convert.quantize
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.convert.recipes import load_recipe

def stuck(messages, what, source):  # the child quantizes on; the parent waits in the middle of it
    messages.recv()
    print("began", flush=True)
    time.sleep(60)

qwen_serve.convert.quantize._follow = stuck
if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    recipe = load_recipe("Q4_K_M")
    qwen_serve.convert.quantize.quantize(source, out, recipe=recipe, imatrix=None, runtime=Runtime(threads=1))
"""


def test_an_interrupt_leaves_no_file_and_no_process(nano_f16: Path, tmp_path: Path) -> None:
    script, out = tmp_path / "slow.py", tmp_path / "q.gguf"
    script.write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, script, nano_f16, out],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to parent and child
    assert process.wait(timeout=30) != 0
    assert not out.exists()
    wait_until(lambda: not group_runs(process.pid))


def test_a_killed_parent_takes_the_work_along(nano_f16: Path, tmp_path: Path) -> None:
    script, out, log = tmp_path / "slow.py", tmp_path / "q.gguf", tmp_path / "log"
    # the child waits at its first tensor until its parent is gone, and would write on then
    script.write_text(SLOW.replace("qwen_serve.convert.quantize._follow = stuck", WAITING))
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, script, nano_f16, out],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"
    assert out.exists()
    process.kill()
    process.wait(timeout=30)
    wait_until(lambda: not group_runs(process.pid), 30)
    assert not out.exists()
    assert log.read_text() == ""


WAITING = """
qwen_serve.convert.quantize._follow = stuck
quantize_file = qwen_serve.convert.quantize.quantize_file

def endless(*arguments, on_tensor, **options):
    arguments[1].write_bytes(b"half")
    on_tensor(1, "a")
    while True:
        time.sleep(0.01)
        on_tensor(1, "a")

qwen_serve.convert.quantize.quantize_file = endless
"""
