"""Two files of replies are compared item by item."""

from pathlib import Path

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.gates.samples import Sample, append_samples


def reply(gate: str, number: int, *outcomes: float) -> Sample:
    return Sample(
        gate=gate,
        task=gate,
        id=str(number),
        earlier_messages=0,
        prompt="?",
        target="A",
        reasoning="",
        answer="A",
        extracted="A",
        outcomes=list(outcomes),
        reference=None,
        finish_reason="stop",
        truncated_thinking=False,
        prompt_tokens=None,
        completion_tokens=None,
        seconds=0.1,
        retries=0,
    )


def test_items_that_one_model_alone_gets_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    # of ten sums the second model gets nine more right; of two instructions, one each way, in part
    append_samples(first, [reply("sums", n, n == 0) for n in range(10)])
    append_samples(second, [reply("sums", n, 1) for n in reversed(range(10))])
    append_samples(first, [reply("orders", 0, 1, 1), reply("orders", 1, 0, 0), reply("orders", 2, 1)])
    append_samples(second, [reply("orders", 0, 1, 0), reply("orders", 1, 1, 0)])
    assert main(["quality", "paired", str(first), str(second)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "sums 10 10.0 100.0 0 9 0.0039 second is better" in lines
    assert "orders 2 50.0 50.0 1 1 1 not told apart" in lines
    assert "all gates 12 - - 1 10 0.012 second is better" in lines


def test_files_without_a_shared_item_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_samples(tmp_path / "a", [reply("sums", 1, 1)])
    append_samples(tmp_path / "b", [reply("sums", 2, 1)])
    assert main(["quality", "paired", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "no item that both were asked" in capsys.readouterr().err
