"""patches/measure.sh with programs that print their environment: each step disables all later changes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_serve.server.llama_build import SOURCES
from tests.patches.changes import changes
from tests.processes import run

PATCHES = Path(__file__).parents[2] / "patches"
SCRIPT = PATCHES / "measure.sh"
QUEUE = changes(PATCHES / "llama.cpp")
OFF = dict(re.findall(r"^    \[([a-z0-9-]+)\]=(\S+)$", SCRIPT.read_text(), re.MULTILINE))
SWITCHED = [name for name in QUEUE if name in OFF]
VARIABLES = sorted({setting.partition("=")[0] for setting in OFF.values()} - {"LLAMA_PATCHES_HIDE"})

BENCH = """#!/bin/sh
set=$(env | grep -E '^(GGML|LLAMA)_' | sort | tr '\\n' ' ')
echo "log"
printf '{"set": "%s", "pp": 512, "pl": 1, "speed_pp": 1, "speed_tg": 1, "t_tg": 1, "tg": 1}\\n' "$set"
"""

PYTHON = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
if sys.argv[1] == "-":
    os.execv(sys.executable, sys.argv)
out = Path(sys.argv[sys.argv.index("--out") + 1])
(run := out / str(len(list(out.glob("*"))))).mkdir(parents=True)
(run / "told.json").write_text(json.dumps([sys.argv, dict(os.environ)]))
values = [("off", "ttft", 20), ("off", "ttft", 30), ("off", "ttft", 90), ("off", "itl", 4)]
values += [("draft", "ttft", 40), ("draft", "itl", 2), ("off", "tokens", 1000)]
with (run / "rows.jsonl").open("w") as file:
    for subject, metric, value in values:
        row = {{"cell": "64 in, 1 at once", "subject": subject, "metric": metric, "value": value}}
        print(json.dumps(row), file=file)
"""


def measure(
    tmp_path: Path, part: str, environment: dict[str, str], variables: list[str] = VARIABLES
) -> subprocess.CompletedProcess[str]:
    """Run the script with a library that reads these variables."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "libllama.so").write_bytes(b"\0".join(name.encode() for name in ["", *variables, ""]))
    (programs / "llama-batched-bench").write_text(BENCH)
    (programs / "llama-batched-bench").chmod(0o755)
    command = [str(SCRIPT), str(programs), str(tmp_path / "model.gguf"), str(tmp_path / "out"), part]
    given = {"PATH": os.environ["PATH"], "ROUNDS": "1", **environment}
    return run(command, env=given, check=True)


def settings(tmp_path: Path) -> dict[str, set[str]]:
    """The variables that were set, by step."""
    lines = (tmp_path / "out" / "waterfall.jsonl").read_text().splitlines()
    return {row["label"]: set(row["set"].split()) for row in map(json.loads, lines)}


def test_every_change_but_these_has_a_switch() -> None:
    without = {"amx-broadcast", "kq-mask-own-cells", "ssm-out-2d", "batch-invariant"}
    without |= {
        "batch-lean",
        "sampled-rows",
        "next-tokens",
        "graph-lean",
        "row-sampler",
        "operand-verification",
    }
    without |= {"state-f16"}
    assert set(QUEUE) - set(OFF) == without
    assert set(OFF) <= set(QUEUE)


def test_switches_are_read_by_someone_and_documented() -> None:
    hooks = [PATCHES / "switches.patch", *PATCHES.glob("llama.cpp/*.patch")]
    kernels = (path for path in (PATCHES.parent / "native").rglob("*") if path.suffix in SOURCES)
    sources = "".join(path.read_text() for path in [*hooks, *kernels])
    table = (PATCHES / "switches.md").read_text()
    for name in VARIABLES:
        assert f'"{name}"' in sources
        assert f"`{name}=" in table


def taken(names: list[str]) -> set[str]:
    """The settings that disable these patches; if several share a variable, the oldest's value."""
    values = dict(OFF[name].split("=", 1) for name in reversed(names))
    return {f"{name}={value}" for name, value in values.items()}


def test_each_step_takes_away_what_is_later(tmp_path: Path) -> None:
    done = measure(tmp_path, "waterfall", {"STEPS": "all"})
    found = settings(tmp_path)
    assert list(found) == ["none", *SWITCHED], done.stderr
    assert found.pop("none") == taken(SWITCHED)
    for step, have in found.items():
        assert have == taken(SWITCHED[SWITCHED.index(step) + 1 :])
    assert found[SWITCHED[-1]] == set()
    assert "LLAMA_PATCHES_HIDE=layer-inputs-ring,shared-snapshots" in found["moe-grouped"]
    assert "LLAMA_PATCHES_HIDE=shared-snapshots" in found["layer-inputs-ring"]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| 512 | 1 |")]
    assert [row.split(" | ")[2] for row in rows] == ["none", *SWITCHED], "one table, in their order"


def test_one_is_left_out_at_a_time(tmp_path: Path) -> None:
    measure(tmp_path, "waterfall", {"STEPS": "each"})
    found = settings(tmp_path)
    assert found.pop("full") == set()
    drafts_only = {"seq-own-cells", "layer-inputs-ring", "shared-snapshots"}
    assert found == {f"-{name}": {OFF[name]} for name in SWITCHED if name not in drafts_only}


def test_a_part_has_the_steps_that_it_can_tell_apart(tmp_path: Path) -> None:
    measure(tmp_path, "waterfall", {})
    drafts_only = {"seq-own-cells", "layer-inputs-ring", "shared-snapshots"}
    assert set(settings(tmp_path)) == {"none", *OFF} - drafts_only


def test_a_step_that_the_build_cannot_take_is_left_out(tmp_path: Path) -> None:
    """It is not measured under its name with a switch that has no effect."""
    known = [name for name in VARIABLES if name != "LLAMA_KV_NO_WINDOW"]
    steps = "attention-own-cells kv-window -kv-window 0016"
    done = measure(tmp_path, "waterfall", {"STEPS": steps}, known)
    assert list(settings(tmp_path)) == ["kv-window"]
    assert "step attention-own-cells is left out" in done.stderr
    assert "step -kv-window is left out" in done.stderr
    assert "LLAMA_KV_NO_WINDOW" in done.stderr
    assert "step 0016 is left out: it is none of none, full, seq-own-cells" in done.stderr


@pytest.mark.parametrize("given", [{}, {"DRAFT_MODEL": "drafter.gguf"}])
def test_drafts_need_a_drafter_and_a_text(tmp_path: Path, given: dict[str, str]) -> None:
    done = measure(tmp_path, "drafts", given)
    assert "left out: it needs DRAFT_MODEL" in done.stdout
    assert not (tmp_path / "out" / "drafts").exists()


def test_drafts_by_step(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    given = {"DRAFT_MODEL": "drafter.gguf", "TEXT": "words.txt", "PYTHON": str(python), "ROUNDS": "2"}
    done = measure(tmp_path, "drafts", given)
    told = sorted((tmp_path / "out" / "drafts").glob("*/*/told.json"))
    assert len(told) == 2 * 5, done.stderr
    caches = set()
    for path in told:
        step = path.parts[-3]
        command, environment = json.loads(path.read_text())
        assert command[1:6] == ["-m", "qwen_serve.bench", "engine", "drafts", str(tmp_path / "model.gguf")]
        assert ("LLAMA_SEQ_ALL_CELLS" in environment) == (step == "-seq-own-cells")
        assert ("LLAMA_PATCHES_HIDE" in environment) == (step in {"moe-grouped", "layer-inputs-ring"})
        assert environment["LLAMA_CPP_LIB_PATH"] == str(tmp_path / "bin")
        caches.add(environment["QWEN_SERVE_CACHE"])
    assert len(caches) == 5, "what a start keeps of its measurements is of one step"
    assert done.stdout.count("| 64 in, 1 at once | off | ") == 5
    assert (
        "| 64 in, 1 at once | off | layer-inputs-ring | 30.00 (30.00 to 30.00) | 4.00 (4.00 to 4.00) |"
        in done.stdout
    )
