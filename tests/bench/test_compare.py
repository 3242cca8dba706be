"""What result files share: figures of every kind, ratios, differences, and files with nothing in common."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bench.conformance import ConformanceResult, Outcome
from bench.gates.result import QualityResult
from bench.perplexity_result import Estimate, Histogram, Kld, PerplexityResult

from bench import compare
from bench.errors import BenchError
from bench.figures import READERS, Figure, figures_of, kind_of
from bench.latency_result import LatencyResult
from bench.measures import Spread
from bench.options import run
from bench.overhead import Level as OverheadLevel
from bench.overhead import OverheadResult
from bench.peers_result import Figure as PeerFigure
from bench.peers_result import PeersResult
from bench.results import Record
from bench.steps import FileSteps, Step, StepsResult
from bench.throughput_result import Level, Score, ThroughputResult
from tests.bench.variants.made import gate, line, result, swept

ROOT = Path(__file__).parents[2]
HEAD: dict[str, Any] = {
    "command": ["x"],
    "url": "http://127.0.0.1:1",
    "model": "m",
    "started": datetime(2026, 1, 1, tzinfo=UTC),
    "seconds": 1.0,
    "host": {"cores": "2"},
    "card": None,
    "versions": {"python": "3.11"},
}
HALF = Spread(p10=0.4, p50=0.5, p90=0.6, p99=0.7)


def latency(seconds: float = 0.5, **head: Any) -> LatencyResult:
    return LatencyResult(
        **{**HEAD, **head},
        endpoint="/invocations",
        stream_endpoint="/v1/completions",
        prompts="words",
        token_counts="usage",
        baseline=None,
        settings={"runs": 3},
        summaries=[line("short", "official", seconds), line("long", "distinct", 2 * seconds)],
        speedup={"official": 1.0 / seconds, "distinct": None},
        runs=[],
    )


def throughput() -> ThroughputResult:
    level = Level(
        concurrency=8,
        requests=8,
        errors=0,
        seconds=1.0,
        output_rate=123.0,
        total_rate=456.0,
        claimed_output_tokens=1,
        verified_output_tokens=1,
        latency=HALF,
        first_token=HALF,
        per_token=None,
        longest_gap=None,
        cached_share=0.25,
        miscounted=0,
        stopped_early=0,
        spot_checks=0,
        spot_checks_passed=0,
    )
    return ThroughputResult(
        **HEAD,
        workload="random",
        endpoint="/v1/completions",
        token_counts="usage",
        settings={},
        levels=[level],
        turns=[],
        score=Score(value=9.0, protocol=False, deviations=[]),
        spot_checks=[],
        requests=[],
    )


def quality() -> QualityResult:
    return QualityResult(
        **HEAD,
        kind="quality",
        limit=0.1,
        seed=0,
        first=False,
        concurrency=8,
        fewshot_as_multiturn=True,
        samples=None,
        gates=[gate("sums", 0.9, 0.8, 0.95, 0.85)],
    )


def overhead() -> OverheadResult:
    level = OverheadLevel(
        concurrency=4, pieces=1, pieces_per_second=1.0, delay=HALF, whole_request=HALF, busy=0.5
    )
    return OverheadResult(**HEAD, settings={}, levels=[level])


def perplexity() -> PerplexityResult:
    kld = Kld(mean=Estimate(value=0.01, error=None), median=0.0, p90=0.0, p99=0.1, p999=0.2, maximum=1.0)
    some = Estimate(value=0.5, error=0.1)
    return PerplexityResult(
        **HEAD,
        reference="f16",
        text="t",
        text_sha256="0",
        bytes=2_000_000,
        reference_bytes=4_000_000,
        context=512,
        skip=256,
        chunks=1,
        tokens=256,
        text_tokens=512,
        reference_text_tokens=512,
        perplexity=some,
        reference_perplexity=some,
        log_ratio=some,
        kld=kld,
        same_top=some,
        dropped=0.0,
        histogram=Histogram(edges=[1.0], counts=[], zero=0),
    )


def peers() -> PeersResult:
    return PeersResult(
        **HEAD,
        workload="latency",
        gguf=None,
        gguf_bytes=None,
        reference="ours",
        resident=False,
        settings={},
        peers=[],
        figures=[
            PeerFigure(peer="ours", what="short, official", unit="ms", value=10.0, ratio=1.0),
            PeerFigure(peer="ours", what="8 at once", unit="tok/s", value=20.0),
        ],
    )


def steps() -> StepsResult:
    file = FileSteps(
        file="a.gguf",
        bytes=1_000_000,
        tokens=10,
        head_type="Q6_K",
        head_bytes=1,
        step_bytes=1,
        draft_bytes=None,
        steps=[Step(sequences=4, seconds=0.02, rounds=[0.02])],
    )
    return StepsResult(**HEAD, program=["p"], output_tokens=4, files=[file])


def phases() -> dict[str, Any]:
    rates = [{"level": 4, "completion_tokens": 36, "seconds": 1.0, "ms_per_token": 3.0}]
    steps = [{"level": 4, "kind": "decode", "rows": 4, "steps": 9, "milliseconds": {"wait": 2.0}}]
    return {"kind": "phases", "rates": rates, "steps": steps}


def roofline() -> dict[str, Any]:
    floor = {"card": "A10G", "category": "short", "case": "plain", "total": {"total": 0.3}}
    return {"kind": "roofline", "predictions": [floor]}


def conformance() -> ConformanceResult:
    outcomes = [
        Outcome(name=str(n), what="", status="FAIL" if n == 2 else "pass", detail="", seconds=0.1)
        for n in range(3)
    ]
    return ConformanceResult(**HEAD, outcomes=outcomes)


def weights() -> dict[str, Any]:
    divergence = {"tokens": 9, "mean": 0.02, "median": 0.0, "p99": 0.2, "maximum": 1.0, "same_top": 0.9}
    return {
        "file": "a",
        "n_bytes": 3_000_000,
        "sha256": "0",
        "bits_per_weight": 4.5,
        "divergence": divergence,
    }


GATES = gate("sums", 0.9, 0.8, 0.95, 0.85)
EXPECTED: list[tuple[Record | dict[str, Any], dict[str, tuple[float, str, str | None]]]] = [
    (
        latency(),
        {
            "short, official: latency": (500, "ms", "lower"),
            "long, distinct: latency": (1000, "ms", "lower"),
            "short, official: first token": (100, "ms", "lower"),
            "speed-up, official": (2, "x", "higher"),
        },
    ),
    (
        throughput(),
        {
            "8 at once: output": (123, "tok/s", "higher"),
            "8 at once: first token": (500, "ms", "lower"),
            "8 at once: cached": (25, "%", None),
            "score": (9, "tok/s", "higher"),
        },
    ),
    (quality(), {"sums: score": (90, "%", "higher"), "sums: thinking cut": (0, "", "lower")}),
    (overhead(), {"4 streams: delay, 99%": (700, "ms", "lower"), "4 streams: core used": (50, "%", "lower")}),
    (perplexity(), {"mean KLD": (0.01, "nats", "lower"), "size": (2, "MB", "lower")}),
    (weights(), {"mean KLD": (0.02, "nats", "lower"), "size": (3, "MB", "lower")}),
    (peers(), {"ours: short, official": (10, "ms", "lower"), "ours: 8 at once": (20, "tok/s", "higher")}),
    (steps(), {"a.gguf: step of 4": (20, "ms", "lower")}),
    (
        phases(),
        {
            "4 at once: per token": (3, "ms", "lower"),
            "4 at once: decode of 4: wait": (2, "ms", "lower"),
        },
    ),
    (
        {
            "kind": "speculation",
            "summaries": [
                {
                    "group": "sums",
                    "drafter": "auto",
                    "seconds_per_token": 0.004,
                    "mean_accepted_length": 2.5,
                }
            ],
        },
        {
            "sums: auto: per token": (4, "ms", "lower"),
            "sums: auto: accepted a draft": (2.5, "tokens", "higher"),
        },
    ),
    (roofline(), {"A10G: short, plain: floor": (300, "ms", "lower")}),
    (conformance(), {"checks passed": (2, "", "higher"), "checks failed": (1, "", "lower")}),
    (
        result("Q8_0", 0.5, GATES, bits=8.0),
        {
            "bits per weight": (8, "", "lower"),
            "mean KLD": (1 / 512, "nats", "lower"),
            "sums: score": (90, "%", "higher"),
            "short, official: latency": (500, "ms", "lower"),
        },
    ),
    (
        swept(result("a", 1.0, GATES), result("b", 0.5, GATES)),
        {"b: speed": (2, "x", "higher"), "a: margin": (5, "points", "higher")},
    ),
]


def dumped(document: Record | dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        document.model_dump_json() if isinstance(document, Record) else json.dumps(document)
    )
    return loaded


@pytest.mark.parametrize(("document", "expected"), EXPECTED, ids=lambda value: type(value).__name__)
def test_every_kinds_figures(
    document: Record | dict[str, Any], expected: dict[str, tuple[float, str, str | None]]
) -> None:
    found = figures_of(dumped(document))
    for name, (value, unit, better) in expected.items():
        assert (found[name].unit, found[name].better) == (unit, better), name
        assert found[name].value == pytest.approx(value), name


def test_every_reader_is_tested() -> None:
    kinds = {kind_of(dumped(document)) for document, _ in EXPECTED}
    assert set(READERS) - kinds == {"conversion", "record"}, "read from committed files below"


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("re*/**/*.json")), ids=lambda path: path.stem)
def test_committed_results_can_be_compared(path: Path) -> None:
    document = json.loads(path.read_text())
    if path.name == "schema.json":
        return
    assert figures_of(document), path


def test_an_unknown_kind_gives_its_named_numbers() -> None:
    document = {
        "kind": "new",
        "seconds": 9,
        "host": {"cores": 3},
        "total": 7,
        "ok": True,
        "parts": [{"name": "a", "delay": HALF.model_dump(), "deep": {"n": 2}}, {"n": 5}, 6],
    }
    assert figures_of(document) == {
        "total": Figure(7.0),
        "parts: a: delay": Figure(0.5),
        "parts: a: deep: n": Figure(2.0),
    }


def test_a_broken_file_is_said_to_be_one() -> None:
    with pytest.raises(BenchError, match="a latency result with a part missing or malformed: KeyError"):
        figures_of({"kind": "latency"})


def test_times_as_good_follows_the_direction() -> None:
    assert Figure(2.0, "ms", "lower").times_as_good(Figure(1.0, "ms", "lower")) == 0.5
    assert Figure(2.0, "tok/s", "higher").times_as_good(Figure(1.0, "tok/s", "higher")) == 2.0
    assert Figure(2.0).times_as_good(Figure(1.0)) is None
    assert Figure(0.0, "", "lower").times_as_good(Figure(1.0, "", "lower")) is None


def written(folder: Path, name: str, document: Record | dict[str, Any]) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dumped(document)))
    return str(path)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = written(tmp_path, "before/run.json", latency(0.5, notes=["a busy machine"]))
    second = written(tmp_path, "after/run.json", latency(0.4, versions={"python": "3.12"}))
    out = tmp_path / "both.json"
    assert run(compare.parser(), compare.compare, [first, second, "--out", str(out)]) == 0
    made = compare.Comparison.load(out)
    assert made.files == ["before/run", "after/run"]
    row = next(row for row in made.rows if row.name == "short, official: latency")
    assert row.values == pytest.approx([500, 400]) and row.ratios == pytest.approx([1, 0.8])
    assert row.times_as_good == pytest.approx([1, 1.25])
    assert made.differences == {"versions python": ["3.11", "3.12"]}
    shown = capsys.readouterr().out
    assert "0.800  better" in shown and "before/run: a busy machine" in shown
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_kinds_meet_in_what_they_share(tmp_path: Path) -> None:
    files = [written(tmp_path, "ppl.json", perplexity()), written(tmp_path, "weights.json", weights())]
    files.append(written(tmp_path, "variant.json", result("Q4_K_M", 0.5, bits=4.5)))
    out = tmp_path / "out.json"
    assert run(compare.parser(), compare.compare, [*files, "--out", str(out)]) == 0
    rows = {row.name: row for row in compare.Comparison.load(out).rows}
    assert set(rows) == {"size", "mean KLD", "99% KLD", "same first choice"}
    assert rows["size"].values == pytest.approx([2, 3, 4.5])


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ((latency(), quality()), "(quality) share no figure: the one has 'short, official: latency'"),
        ((latency(), {"kind": "empty"}), "b.json: a file of kind empty without a figure to compare"),
        ((latency(), {"kind": "latency"}), "b.json: a latency result with a part missing"),
    ],
)
def test_files_that_share_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    contents: tuple[Record | dict[str, Any], ...],
    said: str,
) -> None:
    files = [
        written(tmp_path, f"{name}.json", document) for name, document in zip("ab", contents, strict=True)
    ]
    assert run(compare.parser(), compare.compare, files) == 1
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == ""


def test_files_that_are_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "list.json").write_text("[1]")
    good = written(tmp_path, "good.json", latency())
    for other, said in (
        ("gone.json", "gone.json: cannot be read"),
        ("text.json", "text.json: not JSON"),
        ("list.json", "want a JSON object, not list"),
    ):
        assert run(compare.parser(), compare.compare, [good, str(tmp_path / other)]) == 1
        assert said in capsys.readouterr().err
    assert run(compare.parser(), compare.compare, [good]) == 1
    assert "want at least two" in capsys.readouterr().err
