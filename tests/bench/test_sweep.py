"""A sweep over fake servers: what is made, what is not made twice, and what a failure does to the rest."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import pytest

from bench import latency, sweep
from bench.errors import BenchError
from bench.gates import measure as gates_measure
from bench.options import run
from bench.variants import measure, weights
from bench.variants.plan import Plan
from bench.variants.result import SweepResult, VariantResult
from bench.variants.variant import Variant
from tests.bench.fake_server import Body, FakeServer, Script
from tests.bench.gates.data import all_right, answering, nano_folder

ROOT = Path(__file__).parents[2]
DELAYS = {"Q8_0": 0.5, "Q4_K_M": 0.2}  # seconds before a timed answer: far apart, whatever else runs here


class World:
    """The converter and the servers of a sweep, faked; ``served`` and ``converted`` say what was done."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.settings: dict[str, dict[str, object]] = {}
        self.converted: list[list[str]] = []
        self.unconvertible: set[str] = set()
        self.bytes = b"weights"
        self.scripts: dict[str, Callable[[Script], None]] = {}

    def convert(self, plan: Plan, what: list[str]) -> None:
        kind, names = what
        self.converted.append(list(what))
        for name in names.split(",") if kind == "--quant" else [Path(names).stem]:
            if name in self.unconvertible:
                raise BenchError(f"convert: {name} cannot be made")
            gguf = plan.models / f"{plan.model}-{name}.gguf"
            gguf.parent.mkdir(parents=True, exist_ok=True)
            gguf.write_bytes(self.bytes)
            about = {
                "file": gguf.name,
                "n_bytes": 7,
                "sha256": f"{name} {self.bytes!r}",
                "bits_per_weight": 4.5,
                "divergence": {"tokens": 100, "mean": 0.01, "median": 0.0, "p99": 0.1, "same_top": 0.9},
            }
            gguf.with_suffix(".json").write_text(json.dumps(about))

    @contextmanager
    def serving(self, plan: Plan, variant: Variant, stage: str) -> Iterator[str]:
        assert plan.gguf(variant).is_file()
        self.served.append(variant.name)
        self.settings[variant.name] = plan.server_settings(variant)

        def slow(path: str, body: Body) -> Body:
            if path == "/invocations":
                sleep(DELAYS.get(variant.level, 0.0))
            return body

        script = Script(reply=answering(lambda *_: variant.level != "Q2_K"), on_request=slow)
        self.scripts.get(variant.name, lambda _: None)(script)
        with FakeServer(script) as server:
            yield server.url


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(weights, "convert", made.convert)
    monkeypatch.setattr(measure, "serving", made.serving)
    # pictures have their own tests, and take most of the time here
    monkeypatch.setattr(latency, "draw", lambda *_: None)
    monkeypatch.setattr(gates_measure, "draw", lambda *_: None)
    monkeypatch.setattr(sweep, "draw", lambda *_: {})
    return made


@pytest.fixture
def sweeping(tmp_path: Path) -> Callable[..., int]:
    """Runs the verb on a small folder of held-out items; options of a test come last and win."""
    source = nano_folder(tmp_path / "tiny", all_right())
    usual = ["--src", str(source), "--models", str(tmp_path / "models"), "--out", str(tmp_path / "out")]
    usual += ["--runs", "2", "--warmup", "0", "--stream-runs", "0", "--categories", "short", "--limit", "all"]

    def call(*options: str) -> int:
        return run(sweep.parser(), sweep.sweep, [*usual, *options])

    return call


def test_a_sweep_and_the_same_again(
    world: World, sweeping: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweeping("--quants", "q8_0,Q4_K_M,Q2_K") == 0
    out = tmp_path / "out"
    assert world.converted == [["--quant", "Q8_0,Q4_K_M,Q2_K"]], "one run makes what they share once"
    variants = ["Q8_0", "Q4_K_M", "Q2_K"]
    assert world.served[:3] == variants, "gates"
    assert world.served[3:] == ["Q4_K_M", "Q2_K", "Q8_0", "Q2_K", "Q8_0", "Q4_K_M"], "two rounds, in turn"
    result = SweepResult.load(out / "sweep.json")
    assert result.recommended == "Q4_K_M", "Q2_K is faster and wrong"
    assert [s.verdict for s in result.standings] == ["pass", "pass", "fail"]
    assert [s.front for s in result.standings] == [False, True, True]
    assert result.baseline is not None and result.baseline.name == "Q8_0"
    assert result.standings[0].speed == pytest.approx(1.0) and (result.standings[2].speed or 0) > 1.5
    one = VariantResult.load(out / "Q2_K.json")
    assert [gate.gate for gate in one.gates] == ["nano_knowledge", "nano_instructions", "nano_reasoning"]
    assert one.latency is not None and {line.protocol for line in one.latency.summaries} == {
        "official",
        "distinct",
    }
    assert {line.runs for line in one.latency.summaries} == {2}, "one of each round"
    assert one.weights is not None and one.weights.divergence == 0.01
    for name in ("report.html", "sweep.csv", "sweep.md", "raw/Q2_K/gates.samples.jsonl"):
        assert (out / name).is_file(), name
    assert not list(out.rglob("*.part"))
    shown = capsys.readouterr()
    assert "Ship Q4_K_M" in shown.out and "gates [2/3] Q4_K_M" in shown.err

    # again: nothing is served; another setting, other weights or --force are
    assert sweeping("--quants", "Q8_0,Q4_K_M,Q2_K") == 0
    assert len(world.served) == 9
    assert "Q8_0: finished before" in capsys.readouterr().err
    assert SweepResult.load(out / "sweep.json").recommended == "Q4_K_M"
    assert sweeping("--quants", "Q8_0", "--set", "parallel=4") == 0
    assert len(world.served) == 12 and world.settings["Q8_0"] == {"parallel": 4}
    world.bytes = b"other weights"
    for options, served in (((), 14), ((), 14), (("--force",), 16), (("--rounds", "1"), 17)):
        assert sweeping("--quants", "Q4_K_M", "--tasks", "none", *options) == 0
        assert len(world.served) == served, options


def test_one_failure_is_not_the_others(
    world: World, sweeping: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.unconvertible.add("Q6_K")

    def breaking(script: Script) -> None:
        script.fail = lambda path: 500 if path == "/v1/chat/completions" else None

    world.scripts["Q4_K_M"] = breaking
    options = ("--quants", "Q6_K,Q4_K_M,Q8_0", "--tasks", "nano_instructions")
    assert sweeping(*options) == 1
    out = tmp_path / "out"
    assert world.converted[0] == ["--quant", "Q6_K,Q4_K_M,Q8_0"] and len(world.converted) == 4
    standings = {s.name: s for s in SweepResult.load(out / "sweep.json").standings}
    assert standings["Q6_K"].error == "convert: Q6_K cannot be made"
    assert "scripted failure" in (standings["Q4_K_M"].error or "")
    assert standings["Q8_0"].verdict == "pass"
    shown = capsys.readouterr()
    assert "Ship Q8_0" in shown.out and "2 of 3 variants failed: Q6_K, Q4_K_M" in shown.err
    assert "scripted failure" in (out / "report.html").read_text()

    # mended: what failed is done, the rest stands
    world.unconvertible.clear()
    world.scripts.clear()
    world.served.clear()
    assert sweeping(*options) == 0
    assert sorted(world.served) == 3 * ["Q4_K_M"] + 3 * ["Q6_K"]


def test_an_interrupted_sweep_goes_on(
    world: World,
    sweeping: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    timed = measure.run_latency

    def interrupted(plan: Plan, url: str, out: Path, number: int) -> None:
        if "Q4_K_M" in str(out) and number == 2:
            raise KeyboardInterrupt
        timed(plan, url, out, number)

    monkeypatch.setattr(measure, "run_latency", interrupted)
    options = ("--quants", "Q8_0,Q4_K_M", "--tasks", "nano_instructions")
    assert sweeping(*options) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    monkeypatch.setattr(measure, "run_latency", timed)
    monkeypatch.setattr(measure, "run_gates", lambda *_: pytest.fail("the gates were asked twice"))
    world.served.clear()
    assert sweeping(*options) == 0
    assert world.served == ["Q4_K_M", "Q8_0"], "the second round alone, which begins with another variant"


def test_what_lm_eval_throws_is_one_variants_failure(
    world: World, sweeping: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def thrown(plan: Plan, url: str, out: Path) -> None:
        raise ZeroDivisionError("a task without items")

    monkeypatch.setattr(measure, "run_gates", thrown)
    assert sweeping("--quants", "Q8_0") == 1
    error = VariantResult.load(tmp_path / "out" / "Q8_0.json").error
    assert error is not None and error.startswith("ZeroDivisionError: a task without items")
    assert "Traceback" in (tmp_path / "out/raw/Q8_0/error.txt").read_text()


def test_failed_requests_fail_the_variant(world: World, sweeping: Callable[..., int], tmp_path: Path) -> None:
    def breaking(script: Script) -> None:
        script.fail = lambda path: 503 if path == "/invocations" else None

    world.scripts["Q8_0"] = breaking
    assert sweeping("--quants", "Q8_0", "--tasks", "none") == 1
    error = VariantResult.load(tmp_path / "out" / "Q8_0.json").error
    assert error is not None and "2 requests failed" in error and "scripted failure" in error


def test_variant_files(world: World, sweeping: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('type = "Q4_K_M"\nabout = "plain"\n')
    (tmp_path / "a.toml").write_text(
        'name = "own-kv8"\nrecipe = "own.toml"\n[server]\ncache_type_k = "q8_0"\n'
    )
    (tmp_path / "b.toml").write_text('quant = "Q8_0"\n[server]\nparallel = 2\nmlock = false\n')
    files = [str(tmp_path / name) for name in ("a.toml", "b.toml")]
    assert sweeping("--quants", "Q8_0", "--tasks", "none", "--threads", "1", "--variants", *files) == 0
    assert world.converted == [["--quant", "Q8_0"], ["--recipe", str(tmp_path / "own.toml")]]
    assert world.settings == {
        "Q8_0": {"threads": 1},
        "own-kv8": {"threads": 1, "cache_type_k": "q8_0"},
        "b": {"threads": 1, "parallel": 2, "mlock": False},
    }
    result = SweepResult.load(tmp_path / "out" / "sweep.json")
    assert [standing.name for standing in result.standings] == ["Q8_0", "own-kv8", "b"]
    assert result.recommended is None and "No gate with a threshold was asked" in result.advice[0]


def test_settings_of_the_environment_do_not_slip_in(
    world: World,
    sweeping: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QWEN_PARALLEL", "1")
    assert sweeping("--quants", "Q8_0", "--tasks", "none") == 0
    assert "QWEN_PARALLEL" not in os.environ
    assert "QWEN_PARALLEL is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--quants", "Q9_X"), "--quants: unknown quant 'Q9_X'; known are F16"),
        ((), "nothing to measure: want --quants"),
        (("--quants", "Q8_0", "--set", "speed=9"), "--set: server.speed: unknown; known are"),
        (("--quants", "Q8_0", "--baseline", "gone.json"), "gone.json: cannot be read"),
    ],
)
def test_mistakes_stop_it_before_anything_is_made(
    world: World,
    sweeping: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    said: str,
) -> None:
    assert sweeping(*options) == 1
    assert said in capsys.readouterr().err
    assert world.converted == world.served == []


def test_a_source_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--src", str(tmp_path / "gone"), "--quants", "Q8_0,Q2_K", "--out", str(tmp_path / "out")]
    argv += ["--models", str(tmp_path / "models")]
    assert run(sweep.parser(), sweep.sweep, argv) == 1
    assert "error: convert: --src" in capsys.readouterr().err
    assert not (tmp_path / "out" / "sweep.json").exists()


def test_nano_in_earnest(tmp_path: Path) -> None:
    """The converter, the server and lm-eval, on the fewest items."""
    command = [sys.executable, "bench/sweep.py", "--src", "models/nano", "--quants", "Q8_0", "--threads", "1"]
    command += ["--convert-options=--no-kld", "--tasks", "nano_instructions", "--limit", "4"]
    command += ["--runs", "1", "--warmup", "0", "--stream-runs", "1", "--categories", "short"]
    command += ["--models", str(tmp_path / "models"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    one = VariantResult.load(tmp_path / "out" / "Q8_0.json")
    assert one.gates[0].score == one.gates[0].reference_score == 1.0, "Q8_0 answers as full precision does"
    assert one.weights is not None and 8.5 < one.weights.bits < 8.7 and one.weights.divergence is None
    assert one.latency is not None and one.latency.summaries[0].first_token is not None
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
