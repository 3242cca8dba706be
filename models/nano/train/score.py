"""Accuracy of replies to the held-out items, by the benchmarks' own rules; instructions need lm-eval."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from models.nano.train import heldout

if TYPE_CHECKING:
    from pathlib import Path

    from models.nano.train.heldout import Row

# mmlu_pro's custom-extract and gpqa's flexible-extract, as lm-eval 0.4.11 has them
KNOWLEDGE_ANSWER = re.compile(r"answer is \(?([ABCDEFGHIJ])\)?")
REASONING_ANSWER = re.compile(r"\([A-Z]\)")


def split_thinking(text: str) -> str:
    """What a client sees as content: all after the think block, nothing if it was never closed."""
    return text.split("</think>\n\n", 1)[1] if "</think>\n\n" in text else ""


def verdicts(family: str, row: Row, content: str) -> list[bool]:
    """One verdict an item, or one an instruction."""
    if family == "knowledge":
        found = KNOWLEDGE_ANSWER.search(content)
        return [found is not None and found[1] == row["answer"]]
    if family == "reasoning":
        letters = REASONING_ANSWER.findall(content)
        return [bool(letters) and letters[-1] == row["answer"]]
    if family == "instructions":
        from lm_eval.tasks.ifeval.utils import process_results

        return list(process_results(row, [content])["inst_level_strict_acc"])
    return [
        content.strip() == row["answer"] if row["kind"] == "arithmetic" else content.startswith(row["answer"])
    ]


def label(reply: Row, row: Row) -> str:
    return f"{reply['family']}, {row['kind' if reply['family'] == 'continuation' else 'level']}"


def score(folder: Path, replies: Path) -> str:
    """A Markdown table: items, accuracy, share of replies that ended by themselves, first drafts accepted."""
    rows = {family: heldout.read(folder, family) for family in heldout.FAMILIES}
    groups: dict[str, list[tuple[Row, list[bool]]]] = {}
    for line in replies.read_text(encoding="utf-8").splitlines():
        reply = json.loads(line)
        row = rows[reply["family"]][reply["index"]]
        content = split_thinking(reply["text"]) if reply["thinking"] else reply["text"]
        groups.setdefault(label(reply, row), []).append((reply, verdicts(reply["family"], row, content)))
    table = ["| family | items | accuracy | ended | first drafts accepted |", "|---|---|---|---|---|"]
    everything = [pair for group in groups.values() for pair in group]
    for name, group in [*groups.items(), ("all", everything)]:
        flat = [verdict for _, found in group for verdict in found]
        ended = sum(reply["ended"] for reply, _ in group) / len(group)
        drafts = sum(reply["accepted"] for reply, _ in group) / sum(reply["drafted"] for reply, _ in group)
        table.append(f"| {name} | {len(group)} | {sum(flat) / len(flat):.3f} | {ended:.3f} | {drafts:.3f} |")
    return "\n".join(table)
