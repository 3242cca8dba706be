"""Peers are visited in turns with the same prompts, compared, and one that fails does not stop the others."""

import json
import os
import signal
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from bench import peers, peers_report
from bench.options import run
from bench.peers_report import draw, tables
from bench.peers_result import PeersResult, read_any_baseline, throughput_figures
from bench.peers_steps import step_table
from tests.bench.fake_server import FakeServer, Script
from tests.bench.test_ceiling import BATCHED, write_programs

ROOT = Path(__file__).parents[2]
TOKENIZER = ["--tokenizer", str(ROOT / "models" / "nano")]
QUICK = ["--workload", "latency", "--categories", "short", "--runs", "3", "--warmup", "1", *TOKENIZER]
MANY = [
    "--input-tokens",
    "24",
    "--output-tokens",
    "12",
    "--requests",
    "6",
    "--levels",
    "1,3",
    "--warmup",
    "1",
]
PROGRAM = """#!{python}
import sys, time
sys.path.insert(0, {root!r})
from tests.bench.fake_server import FakeServer, Script
flags = sys.argv
print("started with", *flags[1:], flush=True)
if "--crash" in flags:
    sys.exit("out of memory")
script = Script(fail=lambda path: 500 if "--broken" in flags and "completions" in path else None)
with FakeServer(script, port=int(flags[flags.index("--port") + 1])):
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a second each; one test draws."""
    monkeypatch.setattr(peers, "draw", lambda *_: None)


@pytest.fixture
def binaries(tmp_path: Path) -> Path:
    """A folder of llama.cpp's programs, none of them real."""
    folder = tmp_path / "bin"
    write_programs(folder, BATCHED.replace('"tg": 16', '"tg": 128'))
    program = folder / "llama-server"
    program.write_text(PROGRAM.format(python=sys.executable, root=str(ROOT)))
    program.chmod(0o755)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return folder


def compare(tmp_path: Path, *options: str, status: int = 0) -> PeersResult:
    """Run the command and load what it wrote."""
    out = tmp_path / "peers.json"
    assert run(peers.parser(), peers.peers, [*options, "--out", str(out)]) == status
    return PeersResult.load(out)


def value(result: PeersResult, peer: str, what: str) -> float:
    return next(figure.value for figure in result.figures if (figure.peer, figure.what) == (peer, what))


def ratio(result: PeersResult, peer: str, what: str) -> float:
    found = next(figure.ratio for figure in result.figures if (figure.peer, figure.what) == (peer, what))
    assert found is not None
    return found


def test_latency_of_running_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as fast, FakeServer(Script(token_delay=0.001)) as slow:
        named = ["--peer", f"slow={slow.url}", "--peer", f"fast={fast.url}"]
        result = compare(tmp_path, *named, *QUICK, "--rounds", "2")
        prompts = [
            [body["prompt"] for path, body in server.requests if body.get("max_tokens") == 128]
            for server in (fast, slow)
        ]
    assert prompts[0] == prompts[1], "both get the same prompts"
    assert len(prompts[0]) == 2 * (3 + 2), "three runs and two warm-ups under each protocol"
    assert len(set(prompts[0])) == 1 + 5
    assert result.reference == "slow"
    assert ratio(result, "slow", "short, official") == 1.0
    expected = value(result, "slow", "short, distinct") / value(result, "fast", "short, distinct")
    assert ratio(result, "fast", "short, distinct") == pytest.approx(expected)
    assert expected > 1.2
    assert [one.same_answers["short, official"] for one in result.measured] == [(3, 3), (3, 3)]
    assert result.resident
    text = "\n".join(str(table) for table in tables(result))
    assert "x slow" in text
    assert "3/3" in text
    capsys.readouterr()
    assert run(peers_report.parser(), peers_report.show_files, [str(tmp_path / "peers.json")]) == 0
    assert "| peer | short ms |" in capsys.readouterr().out
    draw(result, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_is_a_baseline(tmp_path: Path) -> None:
    with FakeServer() as server:
        every = [*QUICK, "--categories", "short,medium,long", "--runs", "1", "--protocol", "official"]
        first = compare(tmp_path, "--peer", f"one={server.url}", *every)
        kept = (tmp_path / "peers.json").rename(tmp_path / "first.json")
        baseline = read_any_baseline(str(kept))
        assert baseline is not None
        assert 1000 * baseline.seconds["official"]["long"] == value(first, "one", "long, official")
        second = compare(tmp_path, "--peer", f"one={server.url}", *every, "--baseline", str(kept))
    (official, *_) = tables(second)
    assert official.header[-1] == "score"
    speedups = [line.speedup for line in second.measured[0].summaries]
    score = official.rows[0][-1]
    assert isinstance(score, float)
    assert score == pytest.approx(sum(s for s in speedups if s is not None) / 3)


def test_answers_that_differ_are_counted(tmp_path: Path) -> None:
    def on_answer(_: str, answer: dict[str, object]) -> dict[str, object]:
        choice = answer["choices"][0]  # type: ignore[index]
        return {**answer, "choices": [{**choice, "text": "nonsense"}]}

    with FakeServer() as right, FakeServer(Script(on_answer=on_answer)) as wrong:
        result = compare(tmp_path, "--peer", f"right={right.url}", "--peer", f"wrong={wrong.url}", *QUICK)
    assert result.measured[1].same_answers == {"short, official": (0, 3), "short, distinct": (0, 3)}


@pytest.mark.parametrize("workload", ["random", "shared-prefix", "chat"])
def test_throughput(tmp_path: Path, workload: str) -> None:
    options = [
        "--workload",
        workload,
        *MANY,
        "--warmup",
        "1",
        "--prefix-tokens",
        "40",
        "--turns",
        "2",
        *TOKENIZER,
    ]
    with FakeServer(Script(token_delay=0.002)) as one, FakeServer(Script(token_delay=0.002)) as two:
        result = compare(tmp_path, "--peer", f"a={one.url}", "--peer", f"b={two.url}", *options)
        sent = [
            sorted(json.dumps(body.get("prompt") or body["messages"][:1]) for _, body in server.requests)
            for server in (one, two)
        ]
    assert sent[0] == sent[1]
    assert [level.concurrency for level in result.measured[0].levels] == [1, 3]
    name = f"{workload}, 3 at once"
    assert ratio(result, "b", name) == pytest.approx(value(result, "b", name) / value(result, "a", name))
    assert value(result, "a", name) > value(result, "a", f"{workload}, 1 at once")
    assert "level, peer" in str(tables(result)[0])


def test_waves_follow_the_level_and_text_is_cut_the_same_for_all(tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text(" and one or two" * 400, encoding="utf-8")
    options = [
        "--workload",
        "random",
        *MANY,
        "--waves",
        "2",
        "--text",
        str(text),
        "--warmup",
        "0",
        *TOKENIZER,
    ]
    with FakeServer() as one, FakeServer() as two:
        result = compare(tmp_path, "--peer", f"a={one.url}", "--peer", f"b={two.url}", *options)
        sent = [sorted(body["prompt"] for _, body in server.requests) for server in (one, two)]
    assert [level.requests for level in result.measured[0].levels] == [4, 6]
    assert sent[0] == sent[1]
    assert all(prompt in text.read_text() for prompt in sent[0])


def test_rounds_are_compared_within_themselves(tmp_path: Path) -> None:
    options = ["--workload", "random", *MANY, "--rounds", "3", *TOKENIZER]
    with FakeServer() as one, FakeServer() as two:
        result = compare(tmp_path, "--peer", f"a={one.url}", "--peer", f"b={two.url}", *options)
    rates = {"a": [100.0, 50.0, 10.0], "b": [120.0, 30.0, 12.0]}  # the machine gets slower and slower
    measured = [
        one.model_copy(
            update={
                "levels": [
                    level.model_copy(update={"output_rate": rate})
                    for level, rate in zip(one.levels[::2], rates[one.peer], strict=True)
                ]
            }
        )
        for one in result.measured
    ]
    first, second = throughput_figures(measured, "random", result.settings, None, "a")
    assert (first.value, second.value) == (50, 30)
    assert (first.round_ratio, second.round_ratio) == (1, 1.2)
    assert "by round" in str(tables(result)[0])
    for few in ([measured[0]], [one.model_copy(update={"levels": one.levels[:2]}) for one in measured]):
        assert throughput_figures(few, "random", result.settings, None, "b")[0].round_ratio is None


@pytest.mark.parametrize("residency", ["all", "one"])
def test_programs_are_started_and_stopped(
    tmp_path: Path, binaries: Path, residency: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--gguf", str(tmp_path / "model.gguf"), "--binaries", str(binaries), "--residency", residency]
    named = ["--peer", "a=llama-server", "--peer", "b=llama-server:plain"]
    failing = ["--peer", "crash=llama-server --crash", "--peer", "broken=llama-server --broken"]
    result = compare(tmp_path, *options, *named, *failing, *QUICK, status=1)
    a, b, crash, broken = result.peers
    assert a.failed is None
    assert b.failed is None
    assert crash.failed is not None
    assert "crash ended with status 1; its log ends:" in crash.failed
    assert "out of memory" in crash.failed
    assert broken.failed is not None
    assert "warm-up: POST /v1/completions answered 500" in broken.failed
    assert value(result, "b", "short, distinct") > 0
    assert a.log == str(tmp_path / "peers-logs" / "a.log")
    assert "--no-cache-prompt" in b.command
    assert all(port_is_free(peer.url) for peer in result.peers)
    assert result.ceiling is not None
    official = next(figure for figure in result.figures if figure.peer == "a")
    assert official.ceiling == pytest.approx(1000 * 0.043626)
    assert official.ceiling_share == pytest.approx(43.626 / official.value)
    shown = capsys.readouterr()
    assert "error: failed: crash, broken" in shown.err
    assert "The engine's ceiling" in shown.out


def test_without_the_programs_there_is_no_ceiling(tmp_path: Path, binaries: Path) -> None:
    (binaries / "llama-bench").unlink()
    options = ["--gguf", str(tmp_path / "model.gguf"), "--binaries", str(binaries)]
    with FakeServer() as server:
        result = compare(tmp_path, *options, "--peer", f"x={server.url}", *QUICK)
    assert result.ceiling is None
    assert any("cannot run" in note and "llama-bench" in note for note in result.notes)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything_and_keeps_what_is_measured(
    tmp_path: Path, binaries: Path, number: signal.Signals, status: int
) -> None:
    out = tmp_path / "peers.json"
    command = [sys.executable, "bench/peers.py", "--gguf", str(tmp_path / "model.gguf"), "--no-ceiling"]
    command += ["--binaries", str(binaries), *QUICK]
    command += ["--runs", "100000", "--protocol", "official", "--peer", "llama-server", "--out", str(out)]
    command += ["--categories", "short"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    assert "ready after" in next(line for line in process.stderr if "ready" in line)
    os.kill(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == status
    result = PeersResult.load(out)
    assert result.notes == ["STOPPED before the end"]
    assert port_is_free(result.peers[0].url)


def test_a_server_that_fails_after_its_warm_up_is_out(tmp_path: Path) -> None:
    seen = count()
    broken = Script(fail=lambda path: 500 if path == "/v1/completions" and next(seen) > 0 else None)
    with FakeServer() as good, FakeServer(broken) as bad:
        named = ["--peer", f"bad={bad.url}", "--peer", f"good={good.url}"]
        result = compare(tmp_path, *named, *QUICK, "--rounds", "9", status=1)
    failed, well = result.peers
    assert failed.failed is not None
    assert (
        "short, official: every request failed, the first: POST /v1/completions answered 500" in failed.failed
    )
    assert well.failed is None
    assert result.measured[1].summaries[0].runs == 3, "three rounds of one"
    assert next(one.ratio for one in result.figures if one.peer == "good") is None, "no reference"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peer", "server"], "--gguf: the servers that are started here need a model"),
        (["--peer", "server", "--gguf", "/no.gguf"], "--gguf /no.gguf: no such file"),
        (["--peer", "http://a", "--peer", "http://a"], "two have one name"),
        (["--peer", "http://a", "--reference", "b"], "--reference b: want one of http://a"),
        (["--peer", "nothing"], "not 'nothing'"),
    ],
)
def test_mistakes(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(peers.parser(), peers.peers, options) == 1
    assert message in capsys.readouterr().err


def test_nothing_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--peer", "x=http://127.0.0.1:9", "--start-timeout", "0.2"]
    assert run(peers.parser(), peers.peers, [*options, *QUICK]) == 1
    shown = capsys.readouterr()
    assert "nothing was measured:\nx: x: not ready within 0.2 s: cannot connect" in shown.err
    assert "ms" not in shown.out


def test_our_server(nano_q4_k_m: Path, tmp_path: Path) -> None:
    options = ["--gguf", str(nano_q4_k_m), "--no-ceiling", "--threads", "1", "--runs", "1", "--warmup", "0"]
    named = [
        "--peer",
        "server=server --speculation off",
        "--peer",
        "narrow=server --batch-size 256 --ubatch-size 64",
    ]
    result = compare(tmp_path, *QUICK, *options, *named)
    assert [one.failed for one in result.peers] == [None, None]
    assert result.measured[1].summaries[0].completion_tokens == 128
    assert {one.peer for one in result.figures} == {"server", "narrow"}
    assert result.peers[0].about["model"] == nano_q4_k_m.stem
    counted = result.measured[0].counters["short, official"]
    assert counted["qwen_completion_tokens_total"] == 128
    steps = step_table(result)
    assert steps is not None
    decodes = [row for row in steps.rows if row[:2] == ["server: short, official", "decode"]]
    assert len(decodes) == 1
    (_, _, count, tokens, device, host, _) = decodes[0]
    assert isinstance(count, int)
    assert 100 < count < 128, "the first of 128 tokens comes out of the prefill"
    assert tokens == 1.0
    assert isinstance(device, float)
    assert isinstance(host, float)
    assert device > 0
    assert host > 0


def port_is_free(url: str) -> bool:
    """Whether nothing listens there any more."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0
