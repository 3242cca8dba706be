import pytest

from qwen_serve.bench.gates.gate import OFFICIAL, verdict


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.62, 0.70, "pass"), (0.61, 0.63, "undecided"), (0.5, 0.619, "fail")]
)
def test_a_sample_decides_when_its_interval_does(low: float, high: float, expected: str) -> None:
    assert verdict((low + high) / 2, low, high, 0.62, complete=False) == expected


def test_with_every_item_asked_the_score_decides() -> None:
    assert verdict(0.62, 0.60, 0.64, 0.62, complete=True) == "pass"
    assert verdict(0.6199, 0.60, 0.64, 0.62, complete=True) == "fail"


def test_the_competitions_gates_are_as_published() -> None:
    gates = {gate.name: gate for gate in OFFICIAL}
    assert list(gates) == ["mmlu_pro", "ifeval", "gpqa_diamond", "gsm8k"]
    assert len(gates["mmlu_pro"].tasks) == 14
    modes = [
        (gate.metric, gate.thinking, gate.streamed, gate.max_tokens, gate.threshold) for gate in OFFICIAL
    ]
    assert modes == [
        ("exact_match,custom-extract", False, False, 512, 0.621),
        ("inst_level_strict_acc,none", False, False, 512, 0.814),
        ("exact_match,flexible-extract", True, True, 12_288, 0.630),
        ("exact_match,flexible-extract", False, False, 1_024, 0.875),
    ]
