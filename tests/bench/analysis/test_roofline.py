"""The roofline of the 4B, and its command."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from qwen_serve.bench.analysis.cards import CARDS, Drafts, Reached
from qwen_serve.bench.analysis.geometry import Geometry
from qwen_serve.bench.analysis.roofline import predict
from qwen_serve.bench.cli import main
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.protocol import CATEGORIES
from qwen_serve.bench.models.shapes import SHAPES
from qwen_serve.bench.models.synthetic import Synthetic
from qwen_serve.convert.tensors import TensorPlan
from qwen_serve.llamacpp.gguf import TensorInfo


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
    assert f16.decode(1).n_bytes - f16.decode(0).n_bytes == 32 * 1024
    decode = f16.decode(0)
    assert decode.operations / 2 == pytest.approx(
        4.2e9, rel=0.015
    )  # the trunk and the head, each weight once
    memory, compute, _ = Reached().terms(CARDS["A10G"], decode)
    assert (memory, compute) == (pytest.approx(2 * 4.2e9 / 600e9, rel=0.02), 0.0), "bound by memory"
    memory, compute, _ = Reached().terms(CARDS["A10G"], next(f16.prefill(512)))
    assert compute > memory == 0.0, "bound by compute"


def test_the_recurrent_states_of_64_sequences_are_read_and_written(both: dict[str, Geometry]) -> None:
    """105 MB a sequence and step, more than all the weights at 64."""
    q4 = both["Q4_K"]
    one, many = (q4.decode(0, sequences=sequences).n_bytes for sequences in (1, 64))
    assert (many - one) / 63 == pytest.approx(105e6, rel=0.02)
    assert many - one > q4.n_bytes


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("roofline") / "small.gguf"
    Synthetic.make(SHAPES["small"], mtp_acceptance=0.7, seed=0).write(path, threads=1)
    return path


def test_an_estimate_is_the_sum_of_its_terms_and_above_the_bound(small: Path) -> None:
    geometry, reached = Geometry.load(small), Reached(0.6, 0.3, 2e-6)
    found = predict(CARDS["A10G"], reached, geometry, Drafts(4, 0.7, mtp=True), 512)
    assert len(found) == len(CATEGORIES) * 4
    for values in found.values():
        parts = values["memory ms"] + values["compute ms"] + values["launches ms"]
        assert parts == pytest.approx(values["estimate ms"])
        assert values["never below ms"] < values["estimate ms"]


def test_the_command_prints_every_card(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--draft", "4", "--acceptance", "0.7", "--drafter", "mtp", "--launch-us", "2"]
    assert main(["engine", "roofline", "--model", str(small), *flags]) == 0
    shown = capsys.readouterr().out
    assert all(f"{card}: computed from the tensors of small.gguf, not measured" in shown for card in CARDS)
    assert "decode of 64 sequences at 512" in shown
    assert "no engine reaches" not in shown
    assert main(["engine", "roofline", "--model", str(small), "--cards", "a10g"]) == 0
    assert "which no engine reaches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/nowhere.gguf"], "/nowhere.gguf: "),
        (["--model", __file__], f"{__file__}: "),
    ],
)
def test_a_wrong_flag_is_named(
    flags: list[str], message: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in flags else ["--model", str(small)]
    assert main(["engine", "roofline", *model, *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [["--cards", "RTX"], ["--acceptance", "2"], ["--kv", "f8"], ["--draft", "-1"], ["--compute-share", "0"]],
)
def test_a_flag_beyond_its_values_is_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["engine", "roofline", "--model", "x", *flags])


def test_a_model_of_experts_is_refused() -> None:
    plan = Synthetic.make(SHAPES["small-moe"], mtp_acceptance=0.7, seed=0).weights.plan()
    with pytest.raises(BenchError, match="a model of experts"):
        big(plan, Type.F16)
