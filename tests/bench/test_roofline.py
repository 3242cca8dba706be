"""The floor model: bytes and operations by hand, the card's arithmetic, calibration, and the command."""

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
from bench.results import ResultFile
from bench.roofline import parser, roofline
from bench.roofline_calibration import calibrate, card_of, read_points
from bench.roofline_model import (
    ATTENTION_KERNELS,
    CARDS,
    HEAD_KERNELS,
    LINEAR_KERNELS,
    NEXTN_KERNELS,
    Card,
    Drafts,
    Geometry,
    Terms,
    Work,
    decode_terms,
    prefill_terms,
)
from bench.roofline_report import RooflineResult
from bench.synthetic import SHAPES, Synthetic
from convert.gguf_header import TensorInfo
from convert.tensors import TensorPlan

HIDDEN, FFN, VOCAB = 32, 64, 100
HEAD: dict[str, Any] = {
    "command": ["x"],
    "url": "",
    "model": "m",
    "started": datetime(2026, 1, 1, tzinfo=UTC),
    "seconds": 1.0,
    "host": {},
    "versions": {},
}


def tensors(kind: Type = Type.F16, *, draft: bool = True) -> list[TensorInfo]:
    """A recurrent layer, an attention layer, and an MTP block like the latter; matrices of `kind`."""

    def ffn(block: int) -> list[TensorInfo]:
        shapes = {"ffn_gate": (HIDDEN, FFN), "ffn_up": (HIDDEN, FFN), "ffn_down": (FFN, HIDDEN)}
        return [TensorInfo(f"blk.{block}.{name}.weight", shape, kind) for name, shape in shapes.items()]

    def attention(block: int) -> list[TensorInfo]:
        # 4 query heads and 2 key/value heads of 8; queries with their gate
        shapes = {
            "attn_q": (HIDDEN, 64),
            "attn_k": (HIDDEN, 16),
            "attn_v": (HIDDEN, 16),
            "attn_output": (32, HIDDEN),
        }
        return [TensorInfo(f"blk.{block}.{name}.weight", shape, kind) for name, shape in shapes.items()]

    # 3 value heads of 16, 2 key heads of 16: convolution over 2 * 32 + 48 channels
    linear = [
        TensorInfo("blk.0.attn_qkv.weight", (HIDDEN, 112), kind),
        TensorInfo("blk.0.ssm_conv1d.weight", (4, 112), Type.F32),
        TensorInfo("blk.0.ssm_a", (3,), Type.F32),
        TensorInfo("blk.0.ssm_norm.weight", (16,), Type.F32),
        TensorInfo("blk.0.ssm_out.weight", (64, HIDDEN), kind),
    ]
    head = [TensorInfo("token_embd.weight", (HIDDEN, VOCAB), kind)]
    mtp = [TensorInfo("blk.2.nextn.eh_proj.weight", (2 * HIDDEN, HIDDEN), kind), *attention(2), *ffn(2)]
    return [*head, *linear, *ffn(0), *attention(1), *ffn(1), *(mtp if draft else [])]


FFN_ELEMENTS = 3 * 32 * 64
LINEAR_ELEMENTS = 32 * 112 + 64 * 32 + FFN_ELEMENTS
ATTENTION_ELEMENTS = 32 * 64 + 2 * 32 * 16 + 32 * 32 + FFN_ELEMENTS
SMALL_BYTES = 4 * (4 * 112 + 3 + 16)  # the convolution and the vectors, F32
STATE_ELEMENTS, CONV_ELEMENTS = 3 * 16 * 16, 3 * 112
WEIGHT_BYTES = 2 * (LINEAR_ELEMENTS + ATTENTION_ELEMENTS) + SMALL_BYTES
HEAD_BYTES = 2 * 32 * 100
STATE_BYTES = 4 * (STATE_ELEMENTS + CONV_ELEMENTS)


def test_a_decode_step_by_hand() -> None:
    geometry = Geometry(tensors())
    assert geometry.kv_token_bytes == 2 * (16 + 16)
    assert geometry.state_bytes == STATE_BYTES
    work = geometry.decode(10)
    kv = 2 * 32 * (10 + 1 + 1)  # ten read, the new one read and written
    assert work.n_bytes == WEIGHT_BYTES + HEAD_BYTES + 2 * 32 + kv + 2 * STATE_BYTES
    attention = 4 * 32 * 11  # q.k and p.v over eleven positions
    recurrence = 7 * STATE_ELEMENTS
    matrices = 2 * (LINEAR_ELEMENTS + ATTENTION_ELEMENTS + 32 * 100)
    assert work.operations == matrices + attention + recurrence
    assert work.kernels == LINEAR_KERNELS + ATTENTION_KERNELS + HEAD_KERNELS


def test_several_sequences_share_the_weights_only() -> None:
    geometry = Geometry(tensors())
    one, four = geometry.decode(10), geometry.decode(10, sequences=4)
    assert four.operations == 4 * one.operations
    weights = WEIGHT_BYTES + HEAD_BYTES
    assert four.n_bytes - weights == 4 * (one.n_bytes - weights)
    assert four.rows == 4


def test_a_verification_has_logits_for_every_row() -> None:
    geometry = Geometry(tensors())
    work = geometry.verify(3, 10)
    pairs = 11 + 12 + 13
    assert work.operations == (
        3 * 2 * (LINEAR_ELEMENTS + ATTENTION_ELEMENTS + 3200) + 4 * 32 * pairs + 3 * 7 * STATE_ELEMENTS
    )
    assert work.n_bytes == WEIGHT_BYTES + HEAD_BYTES + 3 * 64 + 2 * 32 * (10 + 2 * 3) + 2 * STATE_BYTES
    assert geometry.verify(1, 10) == geometry.decode(10)


def test_a_prompt_is_read_in_passes_and_only_the_last_has_logits() -> None:
    first, second = Geometry(tensors()).prefill(10, ubatch=8)
    assert (first.rows, second.rows) == (8, 2)
    assert first.n_bytes == WEIGHT_BYTES + 8 * 64 + 2 * 32 * 16 + 2 * STATE_BYTES
    assert second.n_bytes == WEIGHT_BYTES + HEAD_BYTES + 2 * 64 + 2 * 32 * (8 + 4) + 2 * STATE_BYTES
    pairs = sum(range(1, 9)), 9 + 10
    for work, rows, seen, outputs in ((first, 8, pairs[0], 0), (second, 2, pairs[1], 1)):
        matrices = 2 * rows * (LINEAR_ELEMENTS + ATTENTION_ELEMENTS) + 2 * outputs * 3200
        assert work.operations == matrices + 4 * 32 * seen + rows * 7 * STATE_ELEMENTS


def test_quantized_weights_and_caches_move_fewer_bytes_for_the_same_operations() -> None:
    whole, quantized = Geometry(tensors()), Geometry(tensors(Type.Q8_0), kv_bytes=1.0)
    assert quantized.decode(10).operations == whole.decode(10).operations
    saved = whole.decode(10).n_bytes - quantized.decode(10).n_bytes
    matrices = LINEAR_ELEMENTS + ATTENTION_ELEMENTS + 3200 + 32
    assert saved == matrices * (2 - 34 / 32) + 32 * 12


def test_a_draft_reads_the_mtp_block_and_the_head() -> None:
    work = Geometry(tensors()).draft_step(10)
    assert work.n_bytes == 2 * (ATTENTION_ELEMENTS + 64 * 32) + HEAD_BYTES + 64 + 2 * 32 * 12
    assert work.kernels == ATTENTION_KERNELS + HEAD_KERNELS + NEXTN_KERNELS
    with pytest.raises(BenchError, match="no MTP block"):
        Geometry(tensors(draft=False)).draft_step(10)
    assert Geometry(tensors()).decode(10) == Geometry(tensors(draft=False)).decode(10)


def test_an_untied_head_is_read_instead_of_the_embedding() -> None:
    untied = Geometry([*tensors(), TensorInfo("output.weight", (HIDDEN, VOCAB), Type.F32)])
    assert untied.decode(10).n_bytes - Geometry(tensors()).decode(10).n_bytes == HEAD_BYTES


@pytest.mark.parametrize(
    ("work", "expected", "binding"),
    [
        (Work(2000, 500, 3), Terms(2.0, 0.0, 0.3), "memory"),
        (Work(2000, 30_000, 3), Terms(0.0, 3.0, 0.3), "compute"),
        (Work(200, 500, 9), Terms(0.2, 0.0, 0.9), "launch"),
    ],
)
def test_a_pass_takes_its_launches_and_the_slower_of_memory_and_compute(
    work: Work, expected: Terms, binding: str
) -> None:
    terms = Card("x", bandwidth=1000, compute=10_000, vector=1, launch=0.1).terms(work)
    assert (terms.memory, terms.compute) == (expected.memory, expected.compute)
    assert terms.launch == pytest.approx(expected.launch)
    assert terms.binding == binding
    assert terms.total == pytest.approx(expected.total)


def test_the_share_of_the_compute_follows_the_logarithm_of_the_rows() -> None:
    card = Card("x", 1, 1, 1, compute_shares=((1, 0.1), (16, 0.5), (512, 0.9)))
    assert [card.compute_share(rows) for rows in (1, 16, 512, 4000)] == [0.1, 0.5, 0.9, 0.9]
    assert card.compute_share(4) == pytest.approx(0.3)
    assert Card("x", 1, 1, 1).compute_share(64) == 1


@pytest.mark.parametrize(
    ("count", "acceptance", "tokens"), [(2, 0.5, 1.75), (4, 1.0, 5.0), (3, 0.0, 1.0), (1, 0.7, 1.7)]
)
def test_expected_tokens_of_a_verification(count: int, acceptance: float, tokens: float) -> None:
    assert Drafts(count, acceptance, mtp=False).tokens == pytest.approx(tokens)


def test_a_request_is_the_sum_of_its_steps() -> None:
    geometry, card = Geometry(tensors()), Card("x", bandwidth=1.0, compute=1e30, vector=1)
    step = [geometry.decode(100 + i).n_bytes for i in range(4)]
    assert decode_terms(card, geometry, 100, 5, None).memory == pytest.approx(sum(step))
    right = decode_terms(card, geometry, 100, 5, Drafts(1, 1.0, mtp=False))
    assert right.memory == pytest.approx(geometry.verify(2, 100).n_bytes + geometry.verify(2, 102).n_bytes)
    with_mtp = decode_terms(card, geometry, 100, 3, Drafts(1, 1.0, mtp=True))
    draft = geometry.draft_step(100).n_bytes
    assert with_mtp.memory == pytest.approx(geometry.verify(2, 100).n_bytes + draft)
    partly = decode_terms(card, geometry, 100, 2, Drafts(3, 1.0, mtp=False))
    assert partly.memory == pytest.approx(geometry.verify(4, 100).n_bytes / 4)  # one of the four is wanted
    assert prefill_terms(card, geometry, 100, cached=True).memory == geometry.decode(99).n_bytes
    read = prefill_terms(card, geometry, 600, cached=False).memory
    assert read == pytest.approx(sum(work.n_bytes for work in geometry.prefill(600)))


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


def test_another_architecture_is_refused() -> None:
    with pytest.raises(BenchError, match="not the tensors of a Qwen"):
        Geometry([TensorInfo("blk.0.ffn_up.weight", (32, 32), Type.F16)])
    with pytest.raises(BenchError, match="no blocks"):
        Geometry([TensorInfo("token_embd.weight", (32, 32), Type.F16)])


def test_the_result_is_a_result_file() -> None:
    assert issubclass(RooflineResult, ResultFile)
