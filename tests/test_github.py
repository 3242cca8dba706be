"""Issue forms name existing options; workflows are valid, and their steps are scripts."""

import json
import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from qwen_serve.bench.cli import COMMANDS
from qwen_serve.server.released_wheels import CUDA, Released
from qwen_serve.server.settings_sources import parser
from tests.processes import run

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
RELEASE = ROOT / ".github" / "workflows" / "release.yaml"
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


def github_schema(name: str) -> Draft7Validator:
    """What check-jsonschema brings of schemastore.org's."""
    package = find_spec("check_jsonschema")
    if package is None or package.origin is None:
        pytest.skip("check-jsonschema is not installed")
    file = Path(package.origin).parent / "builtin_schemas" / "vendor" / f"github-{name}.json"
    return Draft7Validator(json.loads(file.read_text(encoding="utf-8")))


def workflow(path: Path) -> dict[str, Any]:
    # YAML 1.1 reads the key "on" as true
    return {"on" if key is True else key: value for key, value in yaml.safe_load(path.read_text()).items()}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_what_github_takes(path: Path) -> None:
    schema = github_schema("workflows")
    assert [error.message for error in schema.iter_errors(workflow(path))] == []
    broken = workflow(path)
    next(iter(broken["jobs"].values()))["runs_on"] = "ubuntu"
    assert list(schema.iter_errors(broken))


@pytest.mark.parametrize("path", [one for one in FORMS if one.stem != "config"], ids=lambda path: path.stem)
def test_forms_are_what_github_takes(path: Path) -> None:
    errors = github_schema("issue-forms").iter_errors(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert [error.message for error in errors] == []


def test_steps_of_the_release_are_scripts_that_lie_here() -> None:
    jobs = workflow(RELEASE)["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = [re.search(r"(?:^| )(\.ci/[\w-]+)", step) for step in steps if not step.startswith("pip ")]
    for script in scripts:
        assert script, steps
        file = ROOT / script[1]
        assert os.access(file, os.X_OK), file
        if "bash" in file.read_text().splitlines()[0]:
            run(["bash", "-n", str(file)], check=True)
        else:
            compile(file.read_text(), str(file), "exec")
    assert any(
        shlex.split(step, comments=True) == [".ci/publish", "$GITHUB_REF_NAME", "dist"] for step in steps
    )
    images = {one["label"]: one["image"] for one in jobs["linux"]["strategy"]["matrix"]["include"]}
    assert all(
        image.startswith(f"nvidia/cuda:{CUDA}.")
        for label, image in images.items()
        if label.startswith("cuda-")
    )


def test_the_release_has_what_the_documentation_names() -> None:
    labels = [one["label"] for one in workflow(RELEASE)["jobs"]["linux"]["strategy"]["matrix"]["include"]]
    assert {Released.named(label).cards for label in labels} == {"", "80", "86", "89", "90"}
    assert {Released.named(label).kind.name for label in labels} == {"x86_64", "x86_64-avx512", "aarch64"}
    page = (ROOT / "docs" / "installation.md").read_text()
    assert "8.0, 8.6, 8.9 and 9.0" in page


def test_a_kept_llama_cpp_is_of_all_that_it_is_built_from() -> None:
    """A cache that is found has the patches and kernels of the commit."""
    text = (ROOT / ".github" / "workflows" / "ci.yaml").read_text(encoding="utf-8")
    [key] = re.findall(r"hashFiles\((.*)\)", text)
    assert {"patches/**", "native/**"} <= set(re.findall(r"'([^']+)'", key))
