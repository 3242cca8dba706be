"""The format of our own sources (native/)."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name", ["src/llama-kv-mask.h", "ggml/src/ggml-cuda/mmq-mid.cu", "tests/backend-ops.inc"]
)
def test_make_lint_refuses_a_badly_formatted_line(tmp_path: Path, name: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [command] = set(re.findall(r"^\t\$\(VENV\)/bin/(clang-format .*)$", makefile, re.MULTILINE))
    words = ["sh", "-c", f"{Path(sys.executable).parent}/{command.replace('$$', '$')}"]
    shutil.copytree(ROOT / "native", tmp_path / "native")
    run(words, cwd=tmp_path, check=True)
    with (tmp_path / "native" / name).open("a") as file:
        file.write("static int  twice( int a ) { return 2*a; }\n")
    done = run(words, cwd=tmp_path)
    assert done.returncode != 0
    assert f"{name}:" in done.stderr


def test_git_blame_leaves_out_the_commit_that_formats() -> None:
    """It changes nothing but native/, and is part of the history."""
    commits = re.findall(r"^[0-9a-f]{40}$", (ROOT / ".git-blame-ignore-revs").read_text(), re.MULTILINE)
    assert commits
    if run(["git", "cat-file", "-e", f"{commits[0]}^{{commit}}"], cwd=ROOT).returncode:
        pytest.skip("no history here")
    for commit in commits:
        names = subprocess.check_output(
            ["git", "show", "--name-only", "--format=", commit], cwd=ROOT, text=True
        )
        assert {name.split("/")[0] for name in names.split()} == {"native"}
