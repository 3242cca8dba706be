"""A sweep over fake servers: its stages, what is reused, and the effect of failures."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates import measure as gates_measure
from qwen_serve.bench.gates.estimate import Paired
from qwen_serve.bench.gates.samples import read_samples
from qwen_serve.bench.gates.score import gate_scores
from qwen_serve.bench.load.vocabulary import Vocabulary
from qwen_serve.bench.store import Manifest, Results, load
from qwen_serve.bench.variants import stages, weights
from qwen_serve.bench.variants.plan import Plan
from qwen_serve.bench.variants.standing import Ranking, rank
from qwen_serve.server.variant import Variant
from tests.bench.fake_server import VOCABULARY, Body, FakeServer, Script, decode, encode
from tests.bench.gates.data import all_right, answering, nano_folder
from tests.processes import run as run_program

ROOT = Path(__file__).parents[2]
DELAYS = {"Q8_0": 0.2, "Q4_K_M": 0.05}  # seconds before a timed answer: far apart, whatever else runs here

Sweeping = Callable[..., int]


class FakeTokenizer(Vocabulary):
    """The fake server's tokenizer, in place of one from a file."""

    source, size = "a file", VOCABULARY

    async def encode(self, text: str) -> list[int]:
        return encode(text)

    async def decode(self, ids: Sequence[int]) -> str:
        return decode(ids)


class World:
    """Fakes of a sweep's converter and servers. ``served`` and ``converted``: their calls."""

    def __init__(self) -> None:
        self.served: list[tuple[str, str]] = []
        self.settings: dict[str, dict[str, object]] = {}
        self.converted: list[list[str]] = []
        self.unconvertible: set[str] = set()
        self.bytes = b"weights"
        self.scripts: dict[str, Callable[[Script], None]] = {}

    def convert(self, plan: Plan, what: list[str]) -> set[str]:
        kind, names = what
        self.converted.append(list(what))
        made: set[str] = set()
        for name in names.split(",") if kind == "--quant" else [Path(names).stem]:
            if name in self.unconvertible:
                raise BenchError(f"convert: {name} cannot be made")
            gguf = plan.models / f"{plan.model}-{name}.gguf"
            gguf.parent.mkdir(parents=True, exist_ok=True)
            gguf.write_bytes(self.bytes)
            about = {
                "file": gguf.name,
                "n_bytes": 7_000_000,
                "sha256": f"{name} {self.bytes!r}",
                "bits_per_weight": 4.5,
                "divergence": {"tokens": 100, "mean": 0.01, "median": 0.0, "p99": 0.1, "same_top": 0.9},
            }
            gguf.with_suffix(".json").write_text(json.dumps(about))
            made.add(gguf.name)
        return made

    @contextmanager
    def serving(self, plan: Plan, variant: Variant, log: Path) -> Iterator[str]:
        assert plan.gguf(variant).is_file()
        self.served.append((log.stem.removeprefix(f"{variant.name}-"), variant.name))
        self.settings[variant.name] = plan.server_settings(variant)

        def slow(path: str, body: Body) -> Body:
            if path in ("/invocations", "/v1/completions"):
                sleep(DELAYS.get(variant.level, 0.0))  # levels differ in what they take
            return body

        script = Script(reply=answering(lambda *_: variant.level != "Q2_K"), on_request=slow)
        self.scripts.get(variant.name, lambda _: None)(script)
        with FakeServer(script) as server:
            yield server.url

    def take_served(self) -> list[tuple[str, str]]:
        """The servers since the last call: (stage, variant)."""
        served, self.served = self.served, []
        return served


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(weights, "convert", made.convert)
    monkeypatch.setattr(stages, "serving", made.serving)
    monkeypatch.setattr(stages, "vocabulary_of", lambda _: FakeTokenizer())
    return made


@pytest.fixture
def sweeping(tmp_path: Path) -> Sweeping:
    """Runs the command on a small folder of held-out items. A test's options come last and take
    precedence."""
    source = nano_folder(tmp_path / "tiny", all_right())
    usual = {
        "--src": str(source),
        "--models": str(tmp_path / "models"),
        "--out": str(tmp_path / "out"),
        "--rounds": "2",
        "--warmup": "0",
        "--categories": "short",
        "--limit": "all",
    }

    def call(*options: str) -> int:
        left = [word for name, value in usual.items() if name not in options for word in (name, value)]
        return main(["sweep", *left, *options])

    return call


def stored(folder: Path) -> tuple[Results, str, Manifest]:
    """The newest sweep in the store."""
    results = load([folder])
    run = list(results.manifests)[-1]
    return results, run, results.manifests[run]


def ranked(folder: Path) -> Ranking:
    results, run, _ = stored(folder)
    return rank(results, run)


def test_a_sweep_and_the_same_again(
    world: World, sweeping: Sweeping, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweeping("--quants", "q8_0,Q4_K_M,Q2_K") == 0
    out = tmp_path / "out"
    assert world.converted == [["--quant", "Q8_0,Q4_K_M,Q2_K"]], "one run makes what they share once"
    variants = ["Q8_0", "Q4_K_M", "Q2_K"]
    assert world.take_served() == [
        *(("gates", name) for name in variants),
        *(("round-1", name) for name in variants),
        *(("round-2", name) for name in ("Q4_K_M", "Q2_K", "Q8_0")),
    ], "rounds visit all in turn, each time another one first"
    ranking = ranked(out)
    assert ranking.recommended == "Q4_K_M", "Q2_K is faster and wrong"
    assert [s.verdict for s in ranking.standings] == ["pass", "pass", "fail"]
    assert [s.front for s in ranking.standings] == [False, True, True]
    assert ranking.baseline == "Q8_0"
    speeds = [s.speed.value if s.speed else 0 for s in ranking.standings]
    assert speeds[0] == pytest.approx(1.0) and speeds[1] > 1.5 and speeds[2] > 1.5
    results, run, manifest = stored(out)
    assert manifest.status == "finished"
    one = results.of(run=run, subject="Q2_K")
    assert [gate.gate for gate in gate_scores(one)] == [
        "nano_knowledge",
        "nano_instructions",
        "nano_reasoning",
    ]
    timed = one[one["metric"] == "latency"]
    assert sorted(zip(timed["workload"], timed["round"], strict=True)) == [
        ("distinct", 1),
        ("distinct", 2),
        ("official", 1),
        ("official", 2),
    ]
    assert set(one[one["metric"] == "verified_tokens"]["value"]) == {128.0}
    assert dict(zip(one["metric"], one["value"], strict=True))["kld_mean"] == 0.01
    assert len(read_samples(out / run / "Q2_K.samples.jsonl")) == 26
    shown = capsys.readouterr()
    assert "Ship Q4_K_M" in shown.out and "gates [2/3] Q4_K_M" in shown.err

    # again: nothing is served, nothing is there twice
    assert sweeping("--quants", "Q8_0,Q4_K_M,Q2_K") == 0
    assert world.take_served() == []
    again, _, _ = stored(out)
    assert len(again.manifests) == 1 and len(again.frame) == len(results.frame)
    assert "Ship Q4_K_M" in capsys.readouterr().out
    # more rounds: only those
    assert sweeping("--quants", "Q8_0,Q4_K_M,Q2_K", "--rounds", "3") == 0
    assert world.take_served() == [("round-3", name) for name in ("Q2_K", "Q8_0", "Q4_K_M")]


def test_what_another_sweep_may_use(world: World, sweeping: Sweeping, tmp_path: Path) -> None:
    """Scores of a variant can be reused, but times only within the same rounds."""
    options = ("--tasks", "nano_instructions", "--rounds", "1")
    assert sweeping("--quants", "Q4_K_M", *options) == 0
    world.take_served()
    assert sweeping("--quants", "Q4_K_M,Q2_K", *options) == 0
    assert world.take_served() == [("gates", "Q2_K"), ("round-1", "Q4_K_M"), ("round-1", "Q2_K")]
    results, run, manifest = stored(tmp_path / "out")
    assert manifest.subjects["Q4_K_M"]["scores_from"] == next(iter(results.manifests))
    assert [gate.score for gate in gate_scores(results.of(run=run, subject="Q4_K_M"))] == [1.0]
    assert (tmp_path / "out" / run / "Q4_K_M.samples.jsonl").is_file()
    # other settings of its server, other weights, other items, or --force: anew
    assert sweeping("--quants", "Q4_K_M", *options, "--set", "parallel=4") == 0
    assert world.take_served() == [("gates", "Q4_K_M"), ("round-1", "Q4_K_M")]
    assert world.settings["Q4_K_M"] == {"parallel": 4}
    assert sweeping("--quants", "Q4_K_M", *options, "--limit", "3") == 0
    assert world.take_served() == [("gates", "Q4_K_M")], "the items have nothing to do with the times"
    assert sweeping("--quants", "Q4_K_M", "--tasks", "none", "--rounds", "1") == 0
    assert world.take_served() == []
    results, run, manifest = stored(tmp_path / "out")
    (replies,) = (tmp_path / "out").glob("*/Q4_K_M-*.samples.jsonl")
    assert len(read_samples(replies)) == 8, "what was asked before is kept"
    (kept,) = gate_scores(results.of(run=replies.parent.name, subject="Q4_K_M"))
    assert (kept.items, results.manifests[replies.parent.name].settings["gates"]["limit"]) == (3, 3.0)
    world.bytes = b"other weights"
    for more in ((), ("--force",)):
        assert sweeping("--quants", "Q4_K_M", *options, *more) == 0
        assert world.take_served() == [("gates", "Q4_K_M"), ("round-1", "Q4_K_M")], more


def test_one_failure_is_not_the_others(
    world: World, sweeping: Sweeping, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.unconvertible.add("Q6_K")

    def breaking(script: Script) -> None:
        script.fail = lambda path: 500 if path == "/v1/chat/completions" else None

    world.scripts["Q4_K_M"] = breaking
    options = ("--quants", "Q6_K,Q4_K_M,Q8_0", "--tasks", "nano_instructions", "--rounds", "1")
    assert sweeping(*options) == 1
    out = tmp_path / "out"
    assert world.converted[0] == ["--quant", "Q6_K,Q4_K_M,Q8_0"] and len(world.converted) == 4
    standings = {s.name: s for s in ranked(out).standings}
    assert standings["Q6_K"].error == "convert: Q6_K cannot be made"
    assert "scripted failure" in (standings["Q4_K_M"].error or "")
    assert standings["Q8_0"].verdict == "pass"
    shown = capsys.readouterr()
    assert "Ship Q8_0" in shown.out and "2 of 3 variants failed: Q6_K, Q4_K_M" in shown.err

    # mended: the scores that were had stay
    world.unconvertible.clear()
    world.scripts.clear()
    world.take_served()
    assert sweeping(*options) == 0
    gates = [name for stage, name in world.take_served() if stage == "gates"]
    assert gates == ["Q6_K", "Q4_K_M"]
    assert all(s.error is None and s.verdict == "pass" for s in ranked(out).standings)


def test_a_variant_that_fails_half_way_is_timed_beside_the_others_again(
    world: World, sweeping: Sweeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = stages.Stages.time

    def failing(self: stages.Stages, variant: Variant, number: int) -> None:
        if (variant.name, number) == ("Q4_K_M", 2):
            raise BenchError("out of memory")
        timed(self, variant, number)

    options = ("--quants", "Q8_0,Q4_K_M", "--tasks", "none", "--rounds", "3")
    monkeypatch.setattr(stages.Stages, "time", failing)
    assert sweeping(*options) == 1
    assert [stage for stage, _ in world.take_served()] == ["round-1", "round-1", "round-2", "round-3"]
    monkeypatch.setattr(stages.Stages, "time", timed)
    assert sweeping(*options) == 0
    assert [stage for stage, _ in world.take_served()] == ["round-2", "round-2", "round-3", "round-3"]
    results, _, manifest = stored(tmp_path / "out")
    assert len(results.manifests) == 1 and manifest.subjects["Q4_K_M"]["error"] is None
    timed_rows = results.of(metric="latency", subject="Q8_0", workload="official")
    assert sorted(timed_rows["round"]) == [1, 2, 3], "no round twice"


def test_an_interrupted_sweep_goes_on(
    world: World,
    sweeping: Sweeping,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    timed = stages.Stages.time

    def interrupted(self: stages.Stages, variant: Variant, number: int) -> None:
        if (variant.name, number) == ("Q8_0", 2):
            raise KeyboardInterrupt
        timed(self, variant, number)

    monkeypatch.setattr(stages.Stages, "time", interrupted)
    options = ("--quants", "Q8_0,Q4_K_M", "--tasks", "nano_instructions")
    assert sweeping(*options) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    assert stored(tmp_path / "out")[2].status == "stopped"
    monkeypatch.setattr(stages.Stages, "time", timed)
    world.take_served()
    assert sweeping(*options) == 0
    assert world.take_served() == [("round-2", "Q4_K_M"), ("round-2", "Q8_0")], "the cut round, as a whole"
    results, _, manifest = stored(tmp_path / "out")
    assert len(results.manifests) == 1 and manifest.status == "finished"
    assert not any("STOPPED" in note for note in manifest.notes)
    rounds = results.of(metric="latency", workload="official")[["subject", "round"]]
    assert sorted(rounds.itertuples(index=False, name=None)) == [
        (name, number) for name in ("Q4_K_M", "Q8_0") for number in (1, 2)
    ]


def test_what_lm_eval_throws_is_one_variants_failure(
    world: World, sweeping: Sweeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def thrown(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a task without items")

    monkeypatch.setattr(gates_measure, "ask_gates", thrown)
    assert sweeping("--quants", "Q8_0") == 1
    _, run, manifest = stored(tmp_path / "out")
    assert manifest.subjects["Q8_0"]["error"].startswith("ZeroDivisionError: a task without items")
    assert "Traceback" in (tmp_path / "out" / run / "errors.txt").read_text()


def test_failed_requests_fail_the_variant(world: World, sweeping: Sweeping, tmp_path: Path) -> None:
    def breaking(script: Script) -> None:
        script.fail = lambda path: 503 if path == "/invocations" else None

    world.scripts["Q8_0"] = breaking
    assert sweeping("--quants", "Q8_0", "--tasks", "none") == 1
    error = stored(tmp_path / "out")[2].subjects["Q8_0"]["error"]
    assert "1 requests failed" in error and "scripted failure" in error


def test_variant_files(world: World, sweeping: Sweeping, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('type = "Q4_K_M"\nabout = "plain"\n')
    (tmp_path / "a.toml").write_text(
        'name = "own-kv8"\nrecipe = "own.toml"\n[settings]\ncache_type_k = "q8_0"\n'
    )
    (tmp_path / "b.toml").write_text('quant = "Q8_0"\n[settings]\nparallel = 2\nmlock = false\n')
    files = [str(tmp_path / name) for name in ("a.toml", "b.toml")]
    options = ("--tasks", "none", "--threads", "1", "--rounds", "1")
    assert sweeping("--quants", "Q8_0", *options, "--variants", *files) == 0
    assert world.converted == [["--quant", "Q8_0"], ["--recipe", str(tmp_path / "own.toml")]]
    assert world.settings == {
        "Q8_0": {"threads": 1},
        "own-kv8": {"threads": 1, "cache_type_k": "q8_0"},
        "b": {"threads": 1, "parallel": 2, "mlock": False},
    }
    ranking = ranked(tmp_path / "out")
    assert [s.name for s in ranking.standings] == ["Q8_0", "own-kv8", "b"]
    assert ranking.recommended is None and "No gate with a threshold was asked" in ranking.advice[0]


def test_settings_of_the_environment_do_not_slip_in(
    world: World,
    sweeping: Sweeping,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QWEN_PARALLEL", "1")
    assert sweeping("--quants", "Q8_0", "--tasks", "none", "--rounds", "1") == 0
    assert "QWEN_PARALLEL" not in os.environ
    assert "QWEN_PARALLEL is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--quants", "Q9_X"), "--quants: unknown quant 'Q9_X'; known are F16"),
        ((), "nothing to measure: want --quants"),
        (("--quants", "Q8_0", "--set", "speed=9"), "--set: unknown key 'speed'; known are"),
        (("--quants", "Q8_0", "--baseline", "gone"), "--baseline gone: want first, one of Q8_0, official"),
        (("--quants", "Q8_0", "--convert-options=--out x"), "--convert-options: --out is set by the sweep"),
    ],
)
def test_mistakes_stop_it_before_anything_is_made(
    world: World,
    sweeping: Sweeping,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    said: str,
) -> None:
    assert sweeping(*options) == 1
    assert said in capsys.readouterr().err
    assert world.converted == world.served == []


def test_a_source_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--src", str(tmp_path / "gone"), "--quants", "Q8_0", "--out", str(tmp_path / "out")]
    assert main(["sweep", *argv, "--models", str(tmp_path / "models")]) == 1
    assert "error: convert: --src" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("manifest.json"))


@pytest.mark.slow
def test_nano_in_earnest(tmp_path: Path) -> None:
    """With the real converter, server and lm-eval, on few items."""
    command = [sys.executable, "-m", "qwen_serve.bench", "sweep", "--src", "models/nano", "--quants", "Q8_0"]
    command += ["--convert-options=--no-kld", "--tasks", "nano_instructions", "--limit", "4"]
    command += ["--rounds", "1", "--warmup", "0", "--stream-runs", "1", "--categories", "short"]
    command += ["--models", str(tmp_path / "models"), "--out", str(tmp_path / "out"), "--threads", "1"]
    done = run_program(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    results, _, manifest = stored(tmp_path / "out")
    (gate,) = gate_scores(results.frame)
    assert gate.score == gate.reference_score and gate.paired == Paired(0, 0), "Q8_0 answers as F32 does"
    (bits,) = results.of(metric="bits_per_weight")["value"]
    assert 8.5 < bits < 8.7 and results.of(metric="kld_mean").empty
    assert len(results.of(metric="ttft")) == 2
    assert manifest.subjects["Q8_0"]["settings"] == {"threads": 1}
