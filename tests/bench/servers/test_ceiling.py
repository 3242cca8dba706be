"""The output of llama.cpp's benchmark program is read, and becomes what a server can reach at most."""

import os
import sys
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.servers.ceiling import Batch, read_batches, read_ceiling, record_ceiling, run_batches
from bench.store import Run

# Printed by the program itself, on a CPU, for models/nano at Q4_K_M.
BATCHED = """
{"n_kv_max": 2048, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, \
"n_gpu_layers": -1, "n_threads": 1, "n_threads_batch": 1, "pp": 64, "tg": 16, "pl": 1, "n_kv": 80, \
"t_pp": 0.032997, "speed_pp": 1939.570190, "t_tg": 0.010629, "speed_tg": 1505.315674, "t": 0.043626, \
"speed": 1833.768677}
{"n_kv_max": 2048, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, \
"n_gpu_layers": -1, "n_threads": 1, "n_threads_batch": 1, "pp": 64, "tg": 16, "pl": 4, "n_kv": 320, \
"t_pp": 0.074611, "speed_pp": 3431.129395, "t_tg": 0.047222, "speed_tg": 1355.300537, "t": 0.121833, \
"speed": 2626.546143}

"""


def write_program(folder: Path, output: str = BATCHED, status: int = 0) -> None:
    """llama-batched-bench, which prints this and keeps its flags."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "llama-batched-bench"
    code = "import sys\nopen(__file__ + '.flags', 'a').write(' '.join(sys.argv) + chr(10))\n"
    code += f"print({output!r})\nprint('a warning', file=sys.stderr)\nsys.exit({status})\n"
    program.write_text(f"#!{sys.executable}\n{code}")
    program.chmod(0o755)


def test_rows_are_read() -> None:
    one, four = read_batches(BATCHED)
    assert one == Batch(64, 16, 1, prefill_seconds=0.032997, decode_seconds=0.010629)
    assert four.seconds == pytest.approx(0.121833)
    assert four.output_rate == pytest.approx(4 * 16 / 0.121833)


@pytest.mark.parametrize("output", ["", "error: unable to load model", '{"pp": 64}', "{"])
def test_something_else(output: str) -> None:
    with pytest.raises(BenchError, match="llama-batched-bench"):
        read_batches(output)


async def test_run(tmp_path: Path) -> None:
    write_program(tmp_path)
    shape = {"prompts": [64], "outputs": [16], "sequences": [4, 1, 4]}
    batches = await run_batches(tmp_path, Path("m.gguf"), **shape, threads=1, options=["-b", "9"])  # type: ignore[arg-type]
    assert batches == read_batches(BATCHED)
    flags = (tmp_path / "llama-batched-bench.flags").read_text().split()
    for name, value in (("-npl", "1,4"), ("-c", str(4 * 80)), ("-t", "1"), ("-b", "9"), ("-m", "m.gguf")):
        assert flags[flags.index(name) + 1] == value


async def test_run_fails(tmp_path: Path) -> None:
    shape = {"prompts": [64], "outputs": [16], "sequences": [1]}
    with pytest.raises(BenchError, match=r"cannot run .*llama-batched-bench: No such file"):
        await run_batches(tmp_path, Path("m.gguf"), **shape)  # type: ignore[arg-type]
    write_program(tmp_path, status=1)
    with pytest.raises(BenchError, match=r"failed:\na warning"):
        await run_batches(tmp_path, Path("m.gguf"), **shape)  # type: ignore[arg-type]
    slow = tmp_path / "llama-batched-bench"
    pid = tmp_path / "pid"
    slow.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 60\n")
    with pytest.raises(BenchError, match=r"not done within 5 s"):
        await run_batches(tmp_path, Path("m.gguf"), **shape, timeout=5)  # type: ignore[arg-type]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_it_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    batches = read_batches(BATCHED)
    with Run.begin(tmp_path, "peers", settings={}) as run:
        record_ceiling(run, batches)
        found = read_ceiling(run.results().frame)
    assert found == {(64, 16, 1): batches[0], (64, 16, 4): batches[1]}
    assert not read_ceiling(run.results().of(workload="random"))
