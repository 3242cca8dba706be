"""Decode steps side by side: the bytes are the file's own, the times are what the program says."""

import sys
from pathlib import Path

import pytest

from bench.analysis.geometry import Geometry
from bench.analysis.steps import about
from bench.cli import main
from bench.models.synthetic import SHAPES, Synthetic
from bench.store import load

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
    row |= {{"t_pp": 0.25, "t_tg": factor * sequences * steps}}
    print(json.dumps(row))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "fast.gguf"
    Synthetic.make(SHAPES["small"], mtp_acceptance=0.7, seed=0).write(path, threads=1)
    return path


@pytest.fixture
def binaries(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "llama-batched-bench"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return folder


def test_bytes_of_a_step_hold_each_sequences_state(model: Path, tmp_path: Path, binaries: Path) -> None:
    flags = ["--binaries", str(binaries), "--sequences", "1,64", "--rounds", "1", "--output-tokens", "10"]
    assert main(["steps", str(model), *flags, "--out", str(tmp_path / "store")]) == 0
    moved = load([tmp_path / "store"]).of(metric="step_bytes").set_index("cell")["value"]
    geometry = Geometry.load(model)
    one, many = moved["1 sequence of 21"], moved["64 sequences of 21"]
    each = 2 * geometry.state_bytes + geometry.kv_token_bytes * (21 + 2)
    assert (many - one) * 1e9 / 63 == pytest.approx(each, rel=0.01)
    known = about(model, geometry)
    assert known["head"] == "F16"
    assert known["draft_bytes"] > known["head_bytes"]
    assert known["state_bytes"] == geometry.state_bytes


def test_files_take_turns(
    model: Path, tmp_path: Path, binaries: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "slow.gguf"
    slow.write_bytes(model.read_bytes())
    flags = ["--binaries", str(binaries), "--sequences", "1,8", "--rounds", "5", "--output-tokens", "5"]
    flags += ["--out", str(tmp_path / "store"), "--card", "a card"]
    assert main(["steps", str(model), str(slow), *flags]) == 0
    results = load([tmp_path / "store"])
    times = results.of(metric="step_time")
    for name, factor in (("fast.gguf", 1.0), ("slow.gguf", 2.0)):
        for cell, count in (("1 sequence of 18", 1), ("8 sequences of 18", 8)):
            own = times[(times["subject"] == name) & (times["cell"] == cell)]
            assert own["round"].tolist() == [1, 2, 3, 4, 5]
            assert own["value"].tolist() == pytest.approx([factor * count] * 5)
    read = results.of(metric="prefill_time", cell="1 sequence of 16")["value"]
    assert read.tolist() == [250.0] * 10
    order = times[times["cell"] == "1 sequence of 18"]["subject"].tolist()
    assert order[:4] == ["slow.gguf", "fast.gguf", "fast.gguf", "slow.gguf"]
    shown = capsys.readouterr().out
    assert "0.5x [0.5, 0.5]" in shown
    assert "a card" in shown


def test_what_cannot_be_measured(
    model: Path, tmp_path: Path, binaries: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, text = tmp_path / "broken.gguf", tmp_path / "text.gguf"
    broken.write_bytes(model.read_bytes())
    text.write_text("no model")
    for arguments, message in (
        ([text, "--binaries", binaries], f"error: {text}: "),
        ([tmp_path / "none.gguf", "--binaries", binaries], "none.gguf: "),
        ([model, "--binaries", tmp_path], "error: --binaries: cannot run"),
        ([model, model, "--binaries", binaries], "error: two files have one name"),
        ([broken, "--binaries", binaries], "failed:\ncannot load"),
    ):
        words = ["steps", *map(str, arguments), "--rounds", "1", "--out", str(tmp_path / "store")]
        assert main(words) == 1
        assert message in capsys.readouterr().err
