"""Servers are compared in turns on the same prompts, with ratios paired by round. Failures are reported."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.bench.analysis.statistics import times_as_good
from qwen_serve.bench.cli import main
from qwen_serve.bench.store import Results, load
from tests.bench.fake_server import Body, FakeServer, Script
from tests.marks import slow_but

ROOT = Path(__file__).parents[3]
TOKENIZER = ["--tokenizer", str(ROOT / "models" / "nano")]
SHORT = ["--categories", "short", *TOKENIZER]
QUICK = [*SHORT, "--warmup", "1", "--rounds", "3"]
MANY = ["--input-tokens", "24", "--output-tokens", "12", "--requests", "6", "--levels", "1,3"]
PROGRAM = """#!{python}
import sys, time
sys.path.insert(0, {root!r})
from tests.bench.fake_server import Body, FakeServer, Script
flags = sys.argv
print("started with", *flags[1:], flush=True)
if "--crash" in flags:
    sys.exit("out of memory")
script = Script(fail=lambda path: 500 if "--broken" in flags and "completions" in path else None)
with FakeServer(script, port=int(flags[flags.index("--port") + 1])):
    time.sleep(600)
"""


@pytest.fixture
def binaries(tmp_path: Path) -> Path:
    """A folder with stand-ins for llama.cpp's programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "llama-server"
    program.write_text(PROGRAM.format(python=sys.executable, root=str(ROOT)))
    program.chmod(0o755)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return folder


def compare(tmp_path: Path, *options: str, status: int = 0) -> Results:
    """Run the command and load what it recorded."""
    store = tmp_path / "store"
    assert main(["peers", *options, "--out", str(store)]) == status
    return load([store])


def values(results: Results, metric: str, **where: str) -> list[float]:
    return results.of(metric=metric, **where)["value"].tolist()


def sent_to(servers: Sequence[FakeServer]) -> list[list[str]]:
    return [
        sorted(json.dumps(body.get("prompt") or body["messages"][:1]) for _, body in server.requests)
        for server in servers
    ]


def test_latency_of_running_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as fast, FakeServer(Script(token_delay=0.001)) as slow:
        named = ["--peer", f"slow={slow.url}", "--peer", f"fast={fast.url}"]
        results = compare(tmp_path, *SHORT, *named, "--rounds", "5", "--warmup", "1")
        prompts = sent_to((fast, slow))
    assert prompts[0] == prompts[1], "both get the same prompts"
    assert len(prompts[0]) == 2 * (5 + 5), "a run and a warm-up in each round under each protocol"
    assert len(set(prompts[0])) == 1 + 1 + 5, "the filler, the warm-up's, one a round"
    ratio = times_as_good(results.of(workload="distinct"), "fast", "slow", "latency")
    assert ratio is not None
    assert ratio.rounds == 5
    assert not ratio.significant, "five rounds give no interval"
    assert ratio.value > 1.2
    assert values(results, "same_answers", subject="fast", workload="official") == [1.0] * 5
    (manifest,) = results.manifests.values()
    assert manifest.settings["reference"] == "slow"
    assert manifest.settings["resident"]
    shown = capsys.readouterr().out
    assert "x slow" in shown
    assert ratio.verdict in shown
    assert "5/5" in shown


def test_answers_that_differ_are_counted_and_failed_ones_are_not_answers(tmp_path: Path) -> None:
    def on_answer(_: str, answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "choices": [{**answer["choices"][0], "text": "nonsense"}]}

    seen = count()

    def fail(path: str) -> int | None:
        return 500 if path == "/v1/completions" and next(seen) in (1, 4) else None  # a run of two in a round

    options = [*SHORT, "--protocol", "official", "--runs", "2", "--warmup", "1", "--rounds", "2"]
    with FakeServer(Script(fail=fail)) as right, FakeServer(Script(on_answer=on_answer)) as wrong:
        named = ["--peer", f"right={right.url}", "--peer", f"wrong={wrong.url}"]
        results = compare(tmp_path, *options, *named)
    assert values(results, "failed", subject="right") == [1.0, 1.0]
    for name, same in (("right", 2.0), ("wrong", 0.0)):
        assert sum(values(results, "compared_answers", subject=name)) == 2.0, "failed ones are left out"
        assert sum(values(results, "same_answers", subject=name)) == same


@pytest.mark.parametrize("workload", ["random", "distinct", "shared-prefix", "chat"])
def test_loads(tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--workload",
        workload,
        *MANY,
        "--prefix-tokens",
        "40",
        "--turns",
        "2",
        "--rounds",
        "1",
        "--warmup",
        "1",
    ]
    with FakeServer(Script(token_delay=0.005)) as one, FakeServer(Script(token_delay=0.005)) as two:
        named = ["--peer", f"a={one.url}", "--peer", f"b={two.url}"]
        results = compare(tmp_path, *options, *named, *TOKENIZER)
        first, second = sent_to((one, two))
    assert first == second
    assert (one.peak, two.peak) == (3, 3)
    for level in (1, 3):
        assert values(results, "output_rate", subject="a", cell=f"{level} concurrent")[0] > 0
    assert "3 concurrent" in capsys.readouterr().out


def test_an_open_loop_is_judged_by_its_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workload", "distinct", "--input-tokens", "24", "--output-tokens", "12", "--requests", "6"]
    options += ["--rate", "50", "--goodput", "ttft=500ms", "--rounds", "2", "--warmup", "1", *TOKENIZER]
    with FakeServer() as one, FakeServer(Script(token_delay=0.01)) as two:
        results = compare(tmp_path, *options, "--peer", f"fast={one.url}", "--peer", f"slow={two.url}")
    ratio = times_as_good(results.frame, "slow", "fast", "latency")
    assert ratio is not None
    assert ratio.value < 0.8
    shown = capsys.readouterr().out
    assert ratio.verdict in shown
    assert "goodput req/s" in shown


def test_waves_follow_the_level_and_text_is_cut_the_same_for_all(tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text(" and one or two" * 400, encoding="utf-8")
    options = ["--workload", "distinct", *MANY, "--waves", "2", "--text", str(text), "--warmup", "0"]
    options += ["--spot-checks", "0"]
    with FakeServer() as one, FakeServer() as two:
        named = ["--peer", f"a={one.url}", "--peer", f"b={two.url}", "--rounds", "1"]
        results = compare(tmp_path, *options, *named, *TOKENIZER)
        sent = [sorted(body["prompt"] for _, body in server.requests) for server in (one, two)]
    for level, requests in ((1, 4), (3, 6)):
        assert len(values(results, "latency", subject="a", cell=f"{level} concurrent")) == requests
    assert sent[0] == sent[1]
    assert all(prompt in text.read_text() for prompt in sent[0])


@pytest.mark.parametrize("residency", slow_but(["one"], ["all", "one"]))
def test_programs_are_started_and_stopped(
    tmp_path: Path, binaries: Path, residency: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--gguf", str(tmp_path / "model.gguf"), "--binaries", str(binaries), "--residency", residency]
    named = ["--peer", "a=llama-server", "--peer", "b=llama-server:plain"]
    failing = ["--peer", "crash=llama-server --crash", "--peer", "broken=llama-server --broken"]
    results = compare(
        tmp_path, *SHORT, "--warmup", "1", "--rounds", "2", *options, *named, *failing, status=1
    )
    (manifest,) = results.manifests.values()
    assert manifest.status == "finished" or "failed" in str(manifest.notes)
    subjects = manifest.subjects
    assert {name for name, about in subjects.items() if "failed" in about} == {"crash", "broken"}
    assert "crash ended with status 1; its log ends:" in subjects["crash"]["failed"]
    assert "out of memory" in subjects["crash"]["failed"]
    assert "warm-up: POST /v1/completions answered 500" in subjects["broken"]["failed"]
    assert len(values(results, "latency", subject="b", workload="distinct")) == 2
    assert Path(subjects["a"]["log"]).read_text().startswith("started with")
    assert (subjects["a"]["slots"], subjects["a"]["context"]) == (1, 2 * 256)
    assert subjects["a"]["context"] == subjects["b"]["context"], "equal resources, stated"
    assert "--no-cache-prompt" in subjects["b"]["command"]
    assert all(port_is_free(subjects[name]["url"]) for name in "ab")
    assert "error: failed: crash, broken" in capsys.readouterr().err


def test_vllm_by_url_and_started_here(tmp_path: Path, binaries: Path) -> None:
    """A stand-in named vllm is beside the interpreter. Requests name the model that each server lists."""
    program = binaries / "vllm"
    program.write_text((binaries / "llama-server").read_text())
    program.chmod(0o755)
    (binaries / "python").symlink_to(sys.executable)
    started = ["--peer", "started=vllm:Qwen/Qwen3.5-4B --dtype half", "--python", str(binaries / "python")]
    with FakeServer() as server:
        options = [*SHORT, "--rounds", "2", "--warmup", "0", "--protocol", "official"]
        results = compare(tmp_path, *options, *started, "--peer", f"running={server.url}/v1")
        assert {body["model"] for path, body in server.requests if path == "/v1/completions"} == {"fake"}
    (manifest,) = results.manifests.values()
    command = manifest.subjects["started"]["command"]
    assert command[:3] == ["vllm", "serve", "Qwen/Qwen3.5-4B"]
    assert command[-2:] == ["--dtype", "half"]
    assert (manifest.subjects["started"]["slots"], manifest.subjects["running"].get("slots")) == (1, None)
    for name in ("started", "running"):
        assert len(values(results, "latency", subject=name)) == 2
        assert manifest.subjects[name]["model"] == "fake"
    assert port_is_free(manifest.subjects["started"]["url"])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything_and_keeps_what_is_measured(
    tmp_path: Path, binaries: Path, number: signal.Signals, status: int
) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-m", "qwen_serve.bench", "peers", "--gguf", str(tmp_path / "model.gguf")]
    command += ["--binaries", str(binaries), *SHORT, "--rounds", "100000", "--protocol", "official"]
    command += ["--peer", "llama-server", "--out", str(store)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    for _ in range(600):
        if any(path.stat().st_size for path in store.glob("*/rows.jsonl")):
            break
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    os.kill(process.pid, number)
    assert process.wait(60) == status
    results = load([store])
    (manifest,) = results.manifests.values()
    assert manifest.status == "stopped"
    assert manifest.notes == ["STOPPED: interrupted"]
    assert len(values(results, "latency")) > 0
    assert port_is_free(manifest.subjects["llama-server"]["url"])


def test_a_server_that_fails_after_its_warm_up_is_out(tmp_path: Path) -> None:
    seen = count()
    broken = Script(fail=lambda path: 500 if path == "/v1/completions" and next(seen) > 0 else None)
    with FakeServer() as good, FakeServer(broken) as bad:
        named = ["--peer", f"bad={bad.url}", "--peer", f"good={good.url}"]
        results = compare(tmp_path, *QUICK, *named, status=1)
    (manifest,) = results.manifests.values()
    failed = manifest.subjects["bad"]["failed"]
    assert "official, short, round 1: every request failed, the first: POST /v1/completions" in failed
    assert len(values(results, "latency", subject="good", workload="official")) == 3
    assert times_as_good(results.frame, "good", "bad", "latency") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peer", "server"], "--gguf: the servers that are started here need a model"),
        (["--peer", "server", "--gguf", "/no.gguf"], "--gguf /no.gguf: no such file"),
        (["--peer", "http://a", "--peer", "http://a"], "two have one name"),
        (["--peer", "http://a", "--reference", "b"], "--reference b: want one of http://a"),
        (["--peer", "nothing"], "not 'nothing'"),
        (["--peer", "http://a", "--workload", "random", "--text", "a.txt"], "--text a.txt: the prompts of"),
    ],
)
def test_mistakes(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", *options, "--out", str(tmp_path / "store")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_nothing_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--peer", "x=http://127.0.0.1:9", "--start-timeout", "0.2", "--out", str(tmp_path)]
    assert main(["peers", *options, *QUICK]) == 1
    assert "nothing was measured:\nx: x: not ready within 0.2 s: cannot connect" in capsys.readouterr().err


@pytest.mark.slow
def test_our_server_and_its_own_counters(
    nano_q4_k_m: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--gguf", str(nano_q4_k_m), "--threads", "1", "--rounds", "1", "--warmup", "0"]
    named = ["--peer", "plain=server --speculation off", "--peer", "narrow=server --ubatch-size 64"]
    results = compare(tmp_path, *SHORT, *options, *named)
    assert set(values(results, "claimed_tokens", subject="narrow")) == {128.0}
    (manifest,) = results.manifests.values()
    assert manifest.subjects["plain"]["model"] == nano_q4_k_m.stem
    decodes = results.of(subject="plain", workload="steps", cell="official, short, decode, 1 rows")
    counted = dict(zip(decodes["metric"], decodes["value"], strict=True))
    assert 100 < counted["steps"] < 128, "the first of 128 tokens comes out of the prefill"
    assert counted["step_tokens"] == counted["steps"]
    assert counted["device_time"] > 0
    assert counted["host_time"] > 0
    assert "Steps of our engine" in capsys.readouterr().out


@pytest.mark.slow
def test_held_out_tasks(nano_q4_k_m: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workload", "tasks", "--items", "1", "--max-tokens", "24", "--rounds", "1"]
    options += ["--gguf", str(nano_q4_k_m), "--threads", "1"]
    named = ["--peer", "off=server --speculation off"]
    named += ["--peer", "ngram=server --speculation ngram"]
    results = compare(tmp_path, *options, *named)
    cells = set(results.of(metric="ms_per_token")["cell"])
    assert {"nano_knowledge", "nano_instructions", "nano_reasoning"} < cells
    assert sum(values(results, "compared_answers", subject="ngram")) == 4
    assert "ms a token" in capsys.readouterr().out


def port_is_free(url: str) -> bool:
    """Whether nothing listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1]))) != 0


def test_a_running_servers_requests_have_fields(tmp_path: Path) -> None:
    """One server, measured with several ways to sample."""
    drawn = {"temperature": 0.7, "logit_bias": {"5": 1}}
    with FakeServer() as server:
        peers = ["--peer", f"greedy={server.url}", "--peer", f"drawn={server.url}/v1 {json.dumps(drawn)}"]
        found = compare(
            tmp_path, *peers, *TOKENIZER, "--workload", "random", *MANY, "--rounds", "1", "--spot-checks", "0"
        )
        asked = [body for _, body in server.requests if "prompt" in body]
    assert {body["temperature"] for body in asked} == {0.0, 0.7}
    assert all(body.get("logit_bias") == {"5": 1} for body in asked if body["temperature"])
    assert {len(values(found, "output_rate", subject=name)) for name in ("greedy", "drawn")} == {2}


def test_no_round_begins_after_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One is measured in any case. Fields of a peer may let answers end, and the server counts alone."""
    with FakeServer() as server:
        peer = f'one={server.url} {{"ignore_eos": false}}'
        options = ["--workload", "random", *MANY, "--rounds", "9", "--spot-checks", "0", *TOKENIZER]
        found = compare(tmp_path, "--peer", peer, *options, "--limit", "0.001", "--no-recount")
        asked = [body for _, body in server.requests if "prompt" in body]
    assert not any(body["ignore_eos"] for body in asked)
    assert len(values(found, "output_rate", subject="one")) == 2
    assert not values(found, "recounted_tokens", subject="one")
    assert "1 of 9 rounds began within 0.001 s" in capsys.readouterr().err


def test_a_client_beside_is_not_measured(tmp_path: Path) -> None:
    with FakeServer(Script(token_delay=0.002)) as server:
        peer = f'{server.url} {{"top_k": 7}} beside {{"top_k": 9}}'
        options = ["--workload", "random", *MANY, "--rounds", "2", "--spot-checks", "0", *TOKENIZER]
        found = compare(tmp_path, "--peer", f"one={peer}", *options)
        kinds = [body["top_k"] for _, body in server.requests if "prompt" in body]
    assert kinds.count(7) > 12 * 2, "warm-up too"
    assert 9 in kinds
    assert len(values(found, "latency", subject="one")) == 6 * 2 * 2


def test_a_failing_client_beside_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(path: str, body: Body) -> Body:
        return {**body, "prompt": 7} if body.get("top_k") == 9 else body

    with FakeServer(Script(on_request=refuse, token_delay=0.002)) as server:
        peer = f'{server.url} beside {{"top_k": 9}}'
        options = ["--workload", "random", *MANY, *TOKENIZER, "--out", str(tmp_path)]
        assert main(["peers", "--peer", f"one={peer}", *options]) == 1
    assert "the client beside" in capsys.readouterr().err


@pytest.mark.parametrize("more", ["--flag", "{", "[1]", "{} beside", '{} besides {"a": 1}'])
def test_fields_that_are_no_objects_are_refused(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", "--peer", f"http://127.0.0.1:9 {more}", "--out", str(tmp_path)]) == 1
    assert "[FIELDS] [beside FIELDS]" in capsys.readouterr().err
