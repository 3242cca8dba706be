"""Calibration text from nano's training mixture has every family of tasks, and no held-out item."""

import json
from pathlib import Path

from models.nano.train.__main__ import NANO, parser


def test_calibration_text_has_no_held_out_item(tmp_path: Path) -> None:
    out = tmp_path / "text.txt"
    arguments = parser().parse_args(["text", "--out", str(out), "--tokens", "20000"])
    arguments.run(arguments)
    text = out.read_text(encoding="utf-8")
    for family in ("multiple choice", "Write about", "Let's think step by step:", "<think>", "Options:\n"):
        assert family in text
    asked = {"knowledge": "question", "instructions": "prompt", "reasoning": "Question"}
    for name, field in asked.items():
        lines = (NANO / "heldout" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        items = [json.loads(line)[field] for line in lines]
        assert items
        assert [item for item in items if item in text] == []
