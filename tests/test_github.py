"""What a stranger sees first: badges that are true, forms that ask for what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from qwen_serve.bench.cli import COMMANDS
from qwen_serve.server.settings import parser

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def badges() -> dict[str, str]:
    """Label and value of each badge of the README, as shields.io's static ones spell them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = {}
    for badge in re.findall(r"https://img\.shields\.io/badge/([^)]+)", text):
        label, value, _ = re.split(r"(?<!-)-(?!-)", unquote(badge))
        found[label.replace("--", "-")] = value.replace("--", "-")
    return found


def test_badges_say_what_the_package_says() -> None:
    versions = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    (llama,) = [one for one in PROJECT["dependencies"] if one.startswith("llama-cpp-python")]
    assert badges() == {
        "licence": PROJECT["license"],
        "Python": f"{versions[0]} to {versions[-1]}",
        "llama-cpp-python": llama.rpartition("==")[2],
    }
    assert PROJECT["requires-python"] == f">={versions[0]}"


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
    flags = {option for action in parser()._actions for option in action.option_strings}
    assert set(re.findall(r"(?:qwen-serve|with) `?(--[a-z-]+)", text)) <= flags
    assert set(re.findall(r"qwen-bench ([a-z-]+)", text)) <= set(COMMANDS)


def test_a_bug_report_has_what_is_needed() -> None:
    (path,) = [one for one in FORMS if one.stem == "bug"]
    text = path.read_text(encoding="utf-8")
    for needed in ("qwen-serve --version", "--print-settings", "Log", "SECURITY.md"):
        assert needed in text
