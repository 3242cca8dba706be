"""The output of llama.cpp's benchmark programs is read, and becomes what a server can reach at most."""

import json
import os
import sys
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.servers.ceiling import BatchedRow, Ceiling, measure_ceiling, parse_batched, parse_raw
from bench.store import Run

# Printed by the programs themselves, on a CPU, for models/nano at Q4_K_M.
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
RAW = json.dumps(
    [
        {
            "build_commit": "0c1e570",
            "backends": "CPU",
            "cpu_info": "AMD EPYC",
            "gpu_info": "",
            "n_prompt": prompt,
            "n_gen": generated,
            "avg_ts": rate,
            "stddev_ts": deviation,
        }
        for prompt, generated, rate, deviation in (
            (64, 0, 2893.977216, 262.958513),
            (0, 16, 1394.739092, 24.177803),
        )
    ]
)


def write_programs(folder: Path, batched: str = BATCHED, raw: str = RAW, status: int = 0) -> None:
    """Programs of these names that print this."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, output in (("llama-batched-bench", batched), ("llama-bench", raw)):
        program = folder / name
        code = "import sys\nopen(__file__ + '.flags', 'w').write(' '.join(sys.argv))\n"
        code += f"print({output!r})\nprint('a warning', file=sys.stderr)\nsys.exit({status})\n"
        program.write_text(f"#!{sys.executable}\n{code}")
        program.chmod(0o755)


def test_batched() -> None:
    one, four = parse_batched(BATCHED)
    assert one == BatchedRow(
        prompt_tokens=64, output_tokens=16, sequences=1, prefill_seconds=0.032997, decode_seconds=0.010629
    )
    assert four.seconds == pytest.approx(0.121833)
    assert four.output_rate == pytest.approx(4 * 16 / 0.121833)


def test_raw() -> None:
    build, rows = parse_raw(RAW)
    assert build == "0c1e570 (CPU; AMD EPYC)"
    assert [(row.test, round(row.rate)) for row in rows] == [("pp64", 2894), ("tg16", 1395)]


@pytest.mark.parametrize("output", ["", "error: unable to load model", '{"pp": 64}', "{"])
def test_batched_is_something_else(output: str) -> None:
    with pytest.raises(BenchError, match="llama-batched-bench"):
        parse_batched(output)


@pytest.mark.parametrize("output", ["", "[]", '[{"n_prompt": 1}]', '{"a": 1}'])
def test_raw_is_something_else(output: str) -> None:
    with pytest.raises(BenchError, match="llama-bench"):
        parse_raw(output)


async def test_measure(tmp_path: Path) -> None:
    write_programs(tmp_path)
    ceiling = await measure_ceiling(
        tmp_path, Path("m.gguf"), prompts=[64], outputs=[16], sequences=[1, 4], threads=1, raw_prompts=[2000]
    )
    batched, raw = (
        (tmp_path / f"{name}.flags").read_text().split() for name in ("llama-batched-bench", "llama-bench")
    )
    assert batched[batched.index("-npl") + 1] == "1,4"
    assert batched[batched.index("-c") + 1] == str(4 * 80)
    assert raw[raw.index("-p") + 1] == "64,2000"
    assert ceiling.build == "0c1e570 (CPU; AMD EPYC)"
    assert ceiling.batch(64, 16, 4) is not None
    assert ceiling.batch(64, 16, 8) is None
    assert ceiling.prefill_rate(64) == pytest.approx(2893.977216)
    assert ceiling.prefill_rate(2000) is None


async def test_measure_fails(tmp_path: Path) -> None:
    shape = {"prompts": [64], "outputs": [16], "sequences": [1], "threads": 0}
    with pytest.raises(BenchError, match=r"cannot run .*llama-batched-bench: No such file"):
        await measure_ceiling(tmp_path, Path("m.gguf"), **shape)  # type: ignore[arg-type]
    write_programs(tmp_path, status=1)
    with pytest.raises(BenchError, match=r"llama-batched-bench failed:\na warning"):
        await measure_ceiling(tmp_path, Path("m.gguf"), **shape)  # type: ignore[arg-type]
    slow = tmp_path / "llama-batched-bench"
    pid = tmp_path / "pid"
    slow.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 60\n")
    with pytest.raises(BenchError, match=r"not done within 5 s"):
        await measure_ceiling(tmp_path, Path("m.gguf"), **shape, timeout=5)  # type: ignore[arg-type]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_it_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    ceiling = Ceiling(batched=parse_batched(BATCHED), raw=parse_raw(RAW)[1])
    with Run.begin(tmp_path, "peers", settings={}) as run:
        ceiling.record(run)
        assert Ceiling.of(run.results().frame) == ceiling
    assert Ceiling.of(run.results().of(workload="random")) is None
