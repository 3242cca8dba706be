"""The floor model's calibration on result files, and its command."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from bench.ceiling import BatchedRow, Ceiling, RawRow
from bench.errors import BenchError
from bench.latency_result import CATEGORIES, LatencyResult, Summary
from bench.measures import Spread
from bench.options import run
from bench.peers_result import PeersResult
from bench.roofline import parser, roofline
from bench.roofline_calibration import calibrate, card_of, read_points
from bench.roofline_model import (
    CARDS,
    Card,
    Geometry,
    prefill_terms,
)
from bench.roofline_report import RooflineResult
from bench.synthetic import SHAPES, Synthetic
from convert.gguf_header import TensorInfo
from convert.tensors import TensorPlan

HEAD: dict[str, Any] = {
    "command": ["x"],
    "url": "",
    "model": "m",
    "started": datetime(2026, 1, 1, tzinfo=UTC),
    "seconds": 1.0,
    "host": {},
    "versions": {},
}


TRUE = Card("H200", 4800e9 * 0.6, 989e12, 67e12, 2.5e-6, ((1.0, 0.02), (64.0, 0.05), (512.0, 0.3)))


def ceiling_file(path: Path, geometry: Geometry, *, faster: float = 1.0, card: str = "NVIDIA H200") -> Path:
    """What the engine's own benchmarks would measure if a pass took exactly what `TRUE` says."""

    def prefill(tokens: int) -> float:
        return sum(TRUE.terms(work).total for work in geometry.prefill(tokens)) / faster

    def decode(prompt: int, count: int, sequences: int) -> float:
        step = geometry.decode(prompt + (count - 1) / 2, sequences=sequences)
        return count * TRUE.terms(step).total / faster

    rows = [
        BatchedRow(
            prompt_tokens=512,
            output_tokens=128,
            sequences=sequences,
            prefill_seconds=sequences * prefill(512),
            decode_seconds=decode(512, 128, sequences),
        )
        for sequences in (1, 64)
    ]
    raw = [RawRow(test="pp512", rate=512 / prefill(512), deviation=1.0)]
    result = PeersResult(
        **{**HEAD, "card": f"{card}, 580.1, 143771 MiB"},
        workload="latency",
        gguf=None,
        gguf_bytes=None,
        reference="ours",
        resident=False,
        settings={},
        peers=[],
        ceiling=Ceiling(commands=[], build="b", batched=rows, raw=raw),
    )
    result.save(path)
    return path


def big(plan: TensorPlan, kind: Type) -> Geometry:
    """The model of `plan`, matrices of `kind`."""
    return Geometry(
        [
            TensorInfo(
                tensor.name,
                tuple(reversed(tensor.shape)),
                Type.F32 if tensor.float_type == "F32" else kind,
            )
            for tensor in plan.tensors
        ]
    )


@pytest.fixture(scope="module")
def both() -> dict[str, Geometry]:
    plan = Synthetic.make(SHAPES["4b"], mtp_acceptance=0.7, seed=0).weights.plan()
    return {"F16": big(plan, Type.F16), "Q4_K": big(plan, Type.Q4_K)}


def test_the_4b_is_as_large_as_it_is(both: dict[str, Geometry]) -> None:
    f16 = both["F16"]
    assert f16.kv_token_bytes == 32 * 1024
    assert f16.state_bytes == pytest.approx(50e6, rel=0.06)
    decode = f16.decode(0)
    assert decode.operations / 2 == pytest.approx(
        4.2e9, rel=0.015
    )  # the trunk and the head, each weight once
    a10g = CARDS["A10G"]
    assert a10g.terms(decode).binding == "memory"
    assert a10g.terms(decode).total == pytest.approx(2 * 4.2e9 / 600e9, rel=0.02)
    assert a10g.terms(next(f16.prefill(512))).binding == "compute"


def test_a_calibration_finds_what_the_measurements_were_made_with(
    both: dict[str, Geometry], tmp_path: Path
) -> None:
    points = []
    for name, geometry in both.items():
        points += read_points(ceiling_file(tmp_path / f"{name}.json", geometry), geometry)
    found = calibrate(CARDS["H200"], points, ["F16.json", "Q4_K.json"])
    assert found.bandwidth_share == pytest.approx(0.6, rel=1e-3)
    assert found.launch_seconds == pytest.approx(2.5e-6, rel=1e-3)
    shares = dict(found.compute_shares)
    assert shares[64.0] == pytest.approx(0.05, rel=1e-2)
    assert shares[512.0] == pytest.approx(0.3, rel=1e-2)
    applied = found.apply(CARDS["A10G"])
    assert applied.bandwidth == pytest.approx(0.6 * 600e9, rel=1e-3)
    assert applied.launch == found.launch_seconds
    carried = dict(applied.compute_shares)
    assert carried[64.0] == pytest.approx(0.05 * 989 / 70 * 35 / 67, rel=1e-2)
    assert carried[512.0] == 1.0  # 0.3 of the H200's tensor rate would be more than the A10G's own
    for geometry in both.values():
        for work in (geometry.decode(5000), geometry.verify(64, 2048), *geometry.prefill(512)):
            expected = TRUE.terms(work).total
            assert found.apply(CARDS["H200"]).terms(work).total == pytest.approx(expected, rel=0.02)


def test_one_model_alone_tells_the_launches_only(both: dict[str, Geometry], tmp_path: Path) -> None:
    geometry = both["Q4_K"]
    points = read_points(ceiling_file(tmp_path / "q4.json", geometry), geometry)
    found = calibrate(CARDS["H200"], points, ["q4.json"])
    assert found.bandwidth_share == pytest.approx(1.0)
    step = geometry.decode(512 + 127 / 2)
    assert found.apply(CARDS["H200"]).terms(step).total == pytest.approx(TRUE.terms(step).total)


def test_what_is_faster_than_the_datasheet_is_refused(both: dict[str, Geometry], tmp_path: Path) -> None:
    geometry = both["F16"]
    points = read_points(ceiling_file(tmp_path / "x.json", geometry, faster=10), geometry)
    with pytest.raises(BenchError, match=r"of the H200's bandwidth: was it another card, or another model"):
        calibrate(CARDS["H200"], points, ["x.json"])


def summary(category: str, seconds: float, **changes: Any) -> Summary:
    def spread(value: float) -> Spread:
        return Spread(p10=value, p50=value, p90=value, p99=value)

    fields: dict[str, Any] = {
        "protocol": "distinct",
        "category": category,
        "runs": 1,
        "errors": 0,
        "latency": spread(seconds),
        "speedup": None,
        "prompt_tokens": None,
        "completion_tokens": None,
        "cached_share": 0.0,
        "miscounted": 0,
        "first_token": spread(seconds / 10),
        "per_token": spread(seconds / 200),
        "gap": None,
        "tokens_per_arrival": 1.0,
    }
    return Summary(**{**fields, **changes})


def latency_file(path: Path, *summaries: Summary, card: str | None = "NVIDIA H200, 580.1") -> Path:
    LatencyResult(
        **{**HEAD, "card": card},
        endpoint="/invocations",
        stream_endpoint="/v1/completions",
        prompts="p",
        token_counts="t",
        baseline=None,
        settings={},
        summaries=list(summaries),
        speedup={},
        runs=[],
    ).save(path)
    return path


def test_a_latency_result_calibrates_too(both: dict[str, Geometry], tmp_path: Path) -> None:
    geometry = both["Q4_K"]
    lines = [
        summary(name, 0.5, cached_share=0.0 if name != "long" else 0.9, first_token=spread)
        for name, spread in (
            (name, Spread(p10=t, p50=t, p90=t, p99=t))
            for name, t in (("short", 0.02), ("medium", 0.2), ("long", 0.01))
        )
    ]
    path = latency_file(tmp_path / "l.json", *lines, summary("short", 0.1, protocol="official"))
    points = read_points(path, geometry)
    assert [point.what for point in points] == [
        "decode short",
        "prefill short",
        "decode medium",
        "prefill medium",
        "decode long",
    ]
    assert [len(point.passes) for point in points] == [1, 1, 1, 4, 1]
    found = calibrate(CARDS["H200"], points, [path.name])
    passes = prefill_terms(found.apply(CARDS["H200"]), geometry, 2048, cached=False)
    assert passes.total == pytest.approx(0.2, rel=0.01)


def test_measurements_that_cannot_calibrate_say_why(both: dict[str, Geometry], tmp_path: Path) -> None:
    geometry = both["Q4_K"]
    speculating = latency_file(tmp_path / "s.json", summary("short", 0.1, tokens_per_arrival=2.5))
    with pytest.raises(BenchError, match=r"2\.5 tokens in a piece: this server speculates"):
        read_points(speculating, geometry)
    unstreamed = latency_file(tmp_path / "u.json", summary("short", 0.1, first_token=None))
    with pytest.raises(BenchError, match="no decode of a single sequence"):
        read_points(unstreamed, geometry)
    (tmp_path / "other.json").write_text('{"kind": "quality"}')
    with pytest.raises(BenchError, match="kind 'quality'; want a result of"):
        read_points(tmp_path / "other.json", geometry)
    with pytest.raises(BenchError, match="cannot be read"):
        read_points(tmp_path / "missing.json", geometry)
    elsewhere = latency_file(tmp_path / "e.json", summary("short", 0.1), card=None)
    with pytest.raises(BenchError, match="say which of A10G, L4, H200 that is with --calibrate-card"):
        card_of(elsewhere, None)
    assert card_of(elsewhere, "L4").name == "L4"
    assert card_of(unstreamed, None).name == "H200"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("roofline") / "small.gguf"
    Synthetic.make(SHAPES["small"], mtp_acceptance=0.7, seed=0).write(path, threads=1)
    return path


def test_the_command_predicts_and_puts_measured_beside_it(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = latency_file(
        tmp_path / "measured.json",
        summary("short", 0.5),
        summary("long", 0.25, protocol="official", cached_share=0.99),
        summary("medium", 0.25, latency=None),
    )
    out = tmp_path / "roofline.json"
    flags = ["--model", str(small), "--calibrate", str(measured), "--measured", str(measured)]
    flags += ["--draft", "4", "--acceptance", "0.7", "--drafter", "mtp", "--out", str(out)]
    assert run(parser(), roofline, flags) == 0
    result = RooflineResult.load(out)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert len(result.predictions) == len(CARDS) * len(CATEGORIES) * 4
    for line in result.predictions:
        assert line.total.total == pytest.approx(line.first.total + line.rest.total)
        assert line.total.total == pytest.approx(line.total.memory + line.total.compute + line.total.launch)
        assert line.datasheet < line.total.total
    assert [(line.card, line.category, line.cached, line.measured) for line in result.comparisons] == [
        ("H200", "short", False, 0.5),
        ("H200", "long", True, 0.25),
    ]
    floors = {(p.card, p.category, p.case): p.total.total for p in result.predictions}
    first = result.comparisons[0]
    assert first.predicted == floors["H200", "short", "prompt read"]
    assert first.predicted_with_drafts == floors["H200", "short", "prompt read, drafts"]
    assert result.comparisons[1].predicted == floors["H200", "long", "prompt cached"]
    shown = capsys.readouterr().out
    for line in shown.splitlines():
        if line.startswith("A10G "):
            assert "(prediction)" in line
    assert "A10G (prediction) ms" in shown
    assert "calibrated on the H200 with measured.json" in shown
    assert "which no measurement has confirmed" in shown
    assert json.loads(out.read_text())["calibration"]["card"] == "H200"


def test_a_card_of_ones_own(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.json"
    flags = [
        "--model",
        str(small),
        "--card",
        "l4",
        "--bandwidth",
        "1000",
        "--compute",
        "200",
        "--vector",
        "40",
    ]
    assert run(parser(), roofline, [*flags, "--launch-us", "3", "--out", str(out)]) == 0
    cards = RooflineResult.load(out).cards
    assert [(c.name, c.bandwidth, c.compute, c.launch) for c in cards] == [
        ("L4", 300e9, 121e12, 3e-6),
        ("custom", 1000e9, 200e12, 3e-6),
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bandwidth", "100"], "--bandwidth, --compute and --vector make a card of your own"),
        (["--calibrate", "/nowhere.json"], "--calibrate /nowhere.json: cannot be read"),
        (["--measured", "/nowhere.json"], "--measured /nowhere.json: cannot be read"),
        (["--model", "/nowhere.gguf"], "/nowhere.gguf: "),
        (["--model", __file__], f"{__file__}: "),
    ],
)
def test_a_wrong_flag_is_named(
    flags: list[str], message: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parser(), roofline, ["--model", str(small), *flags]) == 1
    assert f"error: {message}" in capsys.readouterr().err


def test_a_measurement_of_a_card_without_prediction_is_refused(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = latency_file(tmp_path / "m.json", summary("short", 0.5))
    assert run(parser(), roofline, ["--model", str(small), "--card", "L4", "--measured", str(measured)]) == 1
    assert "measured on 'NVIDIA H200, 580.1': name its card with --card" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [["--card", "RTX"], ["--acceptance", "2"], ["--launch-us", "0"], ["--kv", "f8"], ["--draft", "-1"]],
)
def test_a_flag_beyond_its_values_is_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--model", "x", *flags])
