"""reference.json: which held-out items the reference implementation got right, in full precision.

bench and the tests hold conversions, quantizations and servers against it, item by item.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from models.nano.train import heldout
from models.nano.train.evaluate import NEW_TOKENS
from models.nano.train.score import split_thinking, verdicts

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = (
    "python -m models.nano.train generate --replies R && python -m models.nano.train reference --replies R"
)
IDS = {"knowledge": "question_id", "instructions": "key", "reasoning": "id"}


def outcomes(folder: Path, replies: list[dict[str, Any]], family: str) -> dict[str, Any]:
    """Right or wrong by item id: one verdict an item; for instructions a list, one each."""
    rows = heldout.read(folder, family)
    found: dict[str, Any] = {}
    for reply in replies:
        if reply["family"] == family:
            row = rows[reply["index"]]
            content = split_thinking(reply["text"]) if reply["thinking"] else reply["text"]
            right = verdicts(family, row, content)
            found[str(row[IDS[family]])] = right if family == "instructions" else right[0]
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def write_reference(folder: Path, replies: Path, out: Path) -> None:
    """Score `replies` to the held-out items of `folder` and write ``out``, one line a part."""
    read = [json.loads(line) for line in replies.read_text(encoding="utf-8").splitlines()]
    about = {
        "implementation": f"transformers {version('transformers')}, float32, greedy",
        "command": COMMAND,
    }
    parts = {
        family: {
            "thinking": family == "reasoning",
            "max_tokens": NEW_TOKENS[family],
            "items": outcomes(folder, read, family),
        }
        for family in IDS
    }
    lines = [f'"{name}": {json.dumps(value)}' for name, value in (about | parts).items()]
    part = out.with_name(out.name + ".part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    part.replace(out)
