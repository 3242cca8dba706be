"""The forms for issues: they ask for what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from qwen_serve.bench.cli import COMMANDS
from qwen_serve.server.settings_sources import parser

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", [one for one in FORMS if one.stem != "config"], ids=lambda path: path.stem)
def test_forms_are_whole_and_name_what_there_is(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"]
    assert form["description"]
    fields = [one for one in form["body"] if one["type"] != "markdown"]
    assert fields
    for one in fields:
        assert one["type"] in ("input", "textarea")
        assert one["id"]
        assert one["attributes"]["label"]
    assert len({one["id"] for one in fields}) == len(fields)
    text = path.read_text(encoding="utf-8")
    flags = set(re.findall(r"--[a-z-]+", parser().format_help()))
    assert set(re.findall(r"(?:qwen-serve|with) `?(--[a-z-]+)", text)) <= flags
    assert set(re.findall(r"qwen-bench ([a-z-]+)", text)) <= set(COMMANDS)
