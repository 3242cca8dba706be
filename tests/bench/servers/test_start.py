"""Start times of servers, in turns; qwen-serve's also by the stages in its log."""

import sys
from pathlib import Path

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.servers.start import METRIC, READY, REST, VERB, stages, start_tables
from qwen_serve.bench.store import Results, load

ROOT = Path(__file__).parents[3]
PROGRAM = """#!{python}
import sys, time
sys.path.insert(0, {root!r})
from tests.bench.fake_server import FakeServer
flags = sys.argv
print("a fake", flush=True)
with FakeServer(port=int(flags[flags.index("--port") + 1])):
    time.sleep(600)
"""
LOG = """2026-11-23 03:00:00 INFO qwen-serve 0.1.0
2026-11-23 03:00:01 INFO start: plan 0.01 s, weights 0.25 s, first steps 1.50 s
2026-11-23 03:00:01 INFO ready at http://127.0.0.1:8080
"""


def test_stages_are_those_of_the_log() -> None:
    found = stages(LOG, 2.0)
    assert found == pytest.approx({REST: 0.24, "plan": 0.01, "weights": 0.25, "first steps": 1.5})
    assert stages("some other server\n", 2.0) == {}


def measured(tmp_path: Path, *options: str) -> Results:
    assert main(["start", *options, "--threads", "1", "--out", str(tmp_path / "store")]) == 0
    return load([tmp_path / "store"])


@pytest.mark.slow
def test_ours_in_earnest_beside_another(
    nano_q4_k_m: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, root=str(ROOT)))
    program.chmod(0o755)
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path / "cache"))
    peers = ["--peer", "ours=server", "--peer", "llama-server:tuned"]
    results = measured(
        tmp_path,
        *("--gguf", str(nano_q4_k_m), *peers, "--binaries", str(program.parent)),
        *("--rounds", "2", "--slots", "2", "--context", "1024"),
    )
    ours = results.of(subject="ours", workload=VERB, metric=METRIC)
    seconds = ours.groupby("cell")["value"].median()
    assert {READY, REST, "plan", "weights", "contexts"} <= set(seconds.index)
    assert seconds[READY] == pytest.approx(seconds.drop(READY).sum(), abs=0.02)
    assert set(ours["round"]) == {1, 2}, "the first start is not timed"
    other = results.of(subject="llama-server:tuned")
    assert set(other["cell"]) == {READY}
    (manifest,) = results.manifests.values()
    assert "--model" in manifest.subjects["ours"]["command"]
    assert not (tmp_path / "cache").exists(), "what the user's servers remember is left alone"
    (table,) = start_tables(results)
    assert [row[0] for row in table.rows] == ["ours", "llama-server:tuned"]
    assert "ready s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--peer", "http://127.0.0.1:1"], "runs already; want programs that can be started"),
        (["--peer", "llama-server"], "want --binaries, its folder"),
        (["--gguf", "gone.gguf"], "--gguf gone.gguf: not a file"),
    ],
)
def test_what_cannot_be_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    given = options if "--gguf" in options else ["--gguf", str(gguf), *options]
    assert main(["start", *given, "--out", str(tmp_path / "store")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
