"""The roofline's calibration on what a store holds, and its command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from bench.analysis.calibration import Point, calibrate, card_of, read_points, sequences_cell
from bench.analysis.cards import CARDS, Card, binding
from bench.analysis.geometry import Geometry, Work
from bench.cli import main
from bench.errors import BenchError
from bench.load.protocol import CATEGORIES
from bench.models.synthetic import SHAPES, Synthetic
from bench.servers.ceiling import SUBJECT, WORKLOAD
from bench.store import load
from convert.gguf_header import TensorInfo
from convert.tensors import TensorPlan
from tests.bench.made import Row, made_run

H200 = "NVIDIA H200, 143771 MiB"
SHARES = ((1.0, 0.02), (64.0, 0.05), (512.0, 0.3))
TRUE = Card("H200", 4800e9 * 0.6, 989.5e12, 67e12, 1979e12, 2.5e-6, SHARES)


def steps_run(store: Path, geometry: Geometry, *, faster: float = 1.0, card: str = H200) -> Path:
    """What the engine alone would measure if a pass took exactly what `TRUE` says."""
    rows: list[Row] = []
    for sequences in (1, 64):
        step = 1000 * TRUE.terms(geometry.decode(576, sequences=sequences)).sum() / faster
        rows.append(("m.gguf", "decode", sequences_cell(sequences, 576), 1, {"step_time": step}))
    read = 1000 * sum(TRUE.terms(work).sum() for work in geometry.prefill(512)) / faster
    rows.append(("m.gguf", "prefill", sequences_cell(1, 512), 1, {"prefill_time": read}))
    return made_run(store, rows, verb="steps", card=card)


def big(plan: TensorPlan, kind: Type) -> Geometry:
    """The model of `plan`, matrices of `kind`."""
    return Geometry(
        [
            TensorInfo(
                tensor.name,
                tuple(reversed(tensor.shape)),
                Type.F32 if tensor.type == "F32" else kind,
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
    assert binding(a10g.terms(decode)) == "memory"
    assert a10g.terms(decode).sum() == pytest.approx(2 * 4.2e9 / 600e9, rel=0.02)
    assert binding(a10g.terms(next(f16.prefill(512)))) == "compute"


def test_the_recurrent_states_of_64_sequences_are_read_and_written(both: dict[str, Geometry]) -> None:
    """105 MB a sequence and step, more than all the weights at 64."""
    q4 = both["Q4_K"]
    one, many = (q4.decode(0, sequences=sequences).n_bytes for sequences in (1, 64))
    assert (many - one) / 63 == pytest.approx(105e6, rel=0.02)
    assert many - one > q4.n_bytes


def test_a_calibration_finds_what_the_measurements_were_made_with(
    both: dict[str, Geometry], tmp_path: Path
) -> None:
    points = []
    for name, geometry in both.items():
        card, found = read_points(steps_run(tmp_path / name, geometry), geometry)
        assert card.name == "H200"
        points += found
    fit = calibrate(CARDS["H200"], points, ["F16", "Q4_K"])
    assert fit.bandwidth_share == pytest.approx(0.6, rel=1e-3)
    assert fit.launch_seconds == pytest.approx(2.5e-6, rel=1e-3)
    shares = dict(fit.compute_shares)
    assert shares[64.0] == pytest.approx(0.05, rel=1e-2)
    assert shares[512.0] == pytest.approx(0.3, rel=1e-2)
    applied = fit.apply(CARDS["A10G"])
    assert applied.bandwidth == pytest.approx(0.6 * 600e9, rel=1e-3)
    assert applied.launch == fit.launch_seconds
    carried = dict(applied.compute_shares)
    assert carried[64.0] == pytest.approx(0.05 * 989.5 / 70 * 35 / 67, rel=1e-2)
    assert carried[512.0] == 1.0  # 0.3 of the H200's tensor rate would be more than the A10G's own
    for geometry in both.values():
        for work in (geometry.decode(5000), geometry.verify(64, 2048), *geometry.prefill(512)):
            expected = TRUE.terms(work).sum()
            assert fit.apply(CARDS["H200"]).terms(work).sum() == pytest.approx(expected, rel=0.02)


def test_kernels_of_quantized_weights_may_exceed_the_f16_rate(both: dict[str, Geometry]) -> None:
    """Not called impossible below the rate of 8-bit integers, and carried over up to that."""
    geometry = both["Q4_K"]
    (work,) = geometry.prefill(512)
    seconds = work.operations / (1.5 * CARDS["A10G"].compute)
    step = geometry.decode(576)
    points = [
        point_of("decode", step, CARDS["A10G"].terms(step)[0] * 1.01),
        point_of("prefill", work, seconds),
    ]
    fit = calibrate(CARDS["A10G"], points, ["x"], integer=True)
    assert dict(fit.compute_shares)[512.0] == pytest.approx(1.5, rel=0.05)
    assert fit.apply(CARDS["A10G"]).terms(work).sum() == pytest.approx(seconds, rel=0.05)


def point_of(what: str, work: Work, seconds: float) -> Point:
    return Point(what, (work,), seconds)


def test_one_model_alone_tells_the_launches_only(both: dict[str, Geometry], tmp_path: Path) -> None:
    geometry = both["Q4_K"]
    _, points = read_points(steps_run(tmp_path, geometry), geometry)
    fit = calibrate(CARDS["H200"], points, ["q4"])
    assert fit.bandwidth_share == pytest.approx(1.0)
    step = geometry.decode(576)
    assert fit.apply(CARDS["H200"]).terms(step).sum() == pytest.approx(TRUE.terms(step).sum())


def test_what_is_faster_than_the_datasheet_is_refused(both: dict[str, Geometry], tmp_path: Path) -> None:
    geometry = both["F16"]
    _, points = read_points(steps_run(tmp_path, geometry, faster=10), geometry)
    with pytest.raises(BenchError, match=r"of the H200's bandwidth: was it another card, or another model"):
        calibrate(CARDS["H200"], points, ["x"])


def test_the_ceiling_of_a_comparison_calibrates_too(both: dict[str, Geometry], tmp_path: Path) -> None:
    geometry = both["Q4_K"]
    step = TRUE.terms(geometry.decode(512 + 127 / 2)).sum()
    read = sum(TRUE.terms(work).sum() for work in geometry.prefill(512))
    values = {"prefill_seconds": read, "decode_seconds": 128 * step}
    made_run(tmp_path, [(SUBJECT, WORKLOAD, "512 in, 128 out, 1 sequences", 1, values)], card=H200)
    card, points = read_points(tmp_path, geometry)
    fit = calibrate(card, points, ["run"])
    assert fit.apply(card).terms(geometry.decode(575)).sum() == pytest.approx(step, rel=0.01)


def test_measurements_that_cannot_calibrate_say_why(both: dict[str, Geometry], tmp_path: Path) -> None:
    geometry = both["Q4_K"]
    other = made_run(tmp_path / "o", [("s", "official", "short", 1, {"latency": 3.0})], card=H200)
    with pytest.raises(BenchError, match="no decode of a single sequence"):
        read_points(other, geometry)
    with pytest.raises(BenchError, match="no run there"):
        read_points(tmp_path / "missing", geometry)
    elsewhere = made_run(tmp_path / "e", [("s", "official", "short", 1, {"latency": 3.0})])
    with pytest.raises(BenchError, match="say which of A10G, L4, H100, H200 that is with --calibrate-card"):
        card_of(elsewhere, load([elsewhere]), None)
    assert card_of(elsewhere, load([elsewhere]), "L4").name == "L4"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("roofline") / "small.gguf"
    Synthetic.make(SHAPES["small"], mtp_acceptance=0.7, seed=0).write(path, threads=1)
    return path


def test_the_command_estimates_bounds_and_puts_measured_beside_it(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = steps_run(tmp_path / "steps", Geometry.load(small))
    cached = {"prompt_tokens": 8192.0, "cached_tokens": 8100.0}
    measured = made_run(
        tmp_path / "measured",
        [
            ("ours", "distinct", "short", 1, {"latency": 500.0}),
            ("ours", "official", "long", 1, {"latency": 250.0, **cached}),
        ],
        card=H200,
    )
    flags = ["--model", str(small), "--calibrate", str(steps), "--measured", str(measured)]
    flags += ["--draft", "4", "--acceptance", "0.7", "--drafter", "mtp", "--out", str(tmp_path / "store")]
    assert main(["roofline", *flags]) == 0
    results = load([tmp_path / "store"])
    assert {name.split(",")[1] for name in results.frame["subject"]} == {" estimate"}
    wide = results.frame.pivot(index=["subject", "workload", "cell"], columns="metric", values="value")
    assert len(wide) == len(CARDS) * len(CATEGORIES) * 4
    parts = wide["predicted_memory"] + wide["predicted_compute"] + wide["predicted_launches"]
    assert parts.to_numpy() == pytest.approx(wide["predicted_latency"].to_numpy())
    assert (wide["least_latency"] < wide["predicted_latency"]).all()
    shown = capsys.readouterr().out
    assert "not measured" in shown
    assert "Measured, beside the estimates for the same card" in shown
    beside = [line for line in shown.splitlines() if line.strip().startswith("ours")]
    assert [re.split(r"\s{2,}", line.strip())[1] for line in beside] == [
        "short, distinct: prompt read",
        "short, distinct: prompt read, drafts",
        "long, official: prompt cached",
        "long, official: prompt cached, drafts",
    ]
    notes = " ".join(*(manifest.notes for manifest in results.manifests.values()))
    assert "calibrated on the H200 with" in notes
    assert "which no measurement has confirmed" in notes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--calibrate", "/nowhere"], "/nowhere: no run there"),
        (["--measured", "/nowhere"], "/nowhere: no run there"),
        (["--model", "/nowhere.gguf"], "/nowhere.gguf: "),
        (["--model", __file__], f"{__file__}: "),
    ],
)
def test_a_wrong_flag_is_named(
    flags: list[str], message: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in flags else ["--model", str(small)]
    assert main(["roofline", *model, *flags, "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_a_measurement_of_a_card_without_estimate_is_refused(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = made_run(tmp_path / "m", [("s", "distinct", "short", 1, {"latency": 5.0})], card=H200)
    flags = [
        "--model",
        str(small),
        "--cards",
        "L4",
        "--measured",
        str(measured),
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(["roofline", *flags]) == 1
    assert f"measured on {H200}: name its card with --cards" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [["--cards", "RTX"], ["--acceptance", "2"], ["--kv", "f8"], ["--draft", "-1"]],
)
def test_a_flag_beyond_its_values_is_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["roofline", "--model", "x", *flags])


def test_a_model_of_experts_is_refused() -> None:
    plan = Synthetic.make(SHAPES["small-moe"], mtp_acceptance=0.7, seed=0).weights.plan()
    with pytest.raises(BenchError, match="a model of experts"):
        big(plan, Type.F16)
