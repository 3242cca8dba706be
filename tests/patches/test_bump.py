"""patches/bump.py with releases of three files: patches that move, are upstream, conflict, or are
resolved."""

import json
import shutil
import subprocess
import sys
import tarfile
from importlib import import_module
from pathlib import Path

import pytest

from tests.processes import run

SCRIPT = Path(__file__).parents[2] / "patches" / "bump.py"
OLD, NEW = "0.0.1", "0.0.2"
SOURCES = {
    "src/one.cpp": "int one() {\n    return 1;\n}\n",
    "src/two.cpp": "int two() {\n    return 2;\n}\n",
    "src/three.cpp": "int three() {\n    return 3;\n}\n",
}


def sdist(folder: Path, version: str, files: dict[str, str]) -> Path:
    root = folder / f"llama_cpp_python-{version}"
    for name, text in files.items():
        path = root / "vendor" / "llama.cpp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "vendor" / "llama.cpp" / ".git").write_text("gitdir: elsewhere\n")
    archive = folder / f"{root.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root, root.name)
    shutil.rmtree(root)
    return archive


def patch(title: str, file: str, old: str, new: str) -> str:
    lines = SOURCES[file].splitlines()
    body = "\n".join(f"-{line}\n+{new}" if line.strip() == old else f" {line}" for line in lines)
    return (
        "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
        "From: someone <someone@localhost>\nDate: Mon, 23 Nov 2026 10:00:00 +0000\n"
        f"Subject: [PATCH] {title}\n\nWhat and why.\n\n"
        f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n"
        f"@@ -1,{len(lines)} +1,{len(lines)} @@\n{body}\n"
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with bump.py, a queue of two topics, switches and a pin."""
    root = tmp_path / "tree"
    queue = root / "patches" / "llama.cpp"
    queue.mkdir(parents=True)
    for name in ("bump.py", "bump_native.py", "bump_report.py", "bump_sources.py"):
        shutil.copy(SCRIPT.with_name(name), root / "patches")
    (queue / "01-first.patch").write_text(patch("one : first", "src/one.cpp", "return 1;", "    return 10;"))
    (queue / "02-second.patch").write_text(
        patch("two : second", "src/two.cpp", "return 2;", "    return 20;")
    )
    (root / "patches" / "switches.patch").write_text(
        patch("three : switches", "src/three.cpp", "return 3;", '    return getenv("THREE") ? 3 : 30;')
    )
    (root / "pyproject.toml").write_text(f'dependencies = ["llama-cpp-python=={OLD}"]\n')
    (root / "tests" / "patches").mkdir(parents=True)
    (root / "tests" / "patches" / "test_queue.py").write_text(
        "import os, pathlib\n"
        "def test_queue():\n"
        "    assert list(pathlib.Path(os.environ['PATCH_QUEUE']).glob('*.patch'))\n"
    )
    return root


def bump(tree: Path, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    folder = tree.parent
    archives: list[str | Path] = ["--base", sdist(folder, OLD, SOURCES), "--sdist", sdist(folder, NEW, files)]
    command: list[str | Path] = [
        sys.executable,
        tree / "patches" / "bump.py",
        NEW,
        "--skip-build",
        *archives,
        *options,
    ]
    return run(command, cwd=tree)


def work(tree: Path, name: str = NEW) -> Path:
    return tree / ".work" / "bump" / name


def outcomes(tree: Path, name: str = NEW) -> dict[str, str]:
    state = json.loads((work(tree, name) / "state.json").read_text())
    return {name: known["outcome"] for name, known in state["patches"].items()}


def test_a_queue_moves_over_lines_that_moved(tree: Path) -> None:
    files = {name: f"// a new header\n\n{text}" for name, text in SOURCES.items()}
    done = bump(tree, files)
    assert done.returncode == 0, done.stderr
    assert outcomes(tree) == {"01-first": "merged", "02-second": "merged", "switches": "merged"}
    moved = (work(tree) / "patches" / "llama.cpp" / "01-first.patch").read_text()
    assert "@@ -1,5 +1,5 @@\n // a new header" in moved
    assert "What and why." in moved
    assert "\nindex " not in moved
    assert "0 conflicting hunks in 0 of 3 patches" in done.stdout
    assert "tests/patches | 1 passed" in done.stdout


@pytest.mark.slow
def test_what_upstream_has_is_left_out(tree: Path) -> None:
    done = bump(tree, SOURCES | {"src/two.cpp": "int two() {\n    return 20;\n}\n"})
    assert done.returncode == 0, done.stderr
    assert outcomes(tree)["02-second"] == "upstream has it"
    queue = work(tree) / "patches"
    assert [path.name for path in (queue / "llama.cpp").iterdir()] == ["01-first.patch"]
    assert (queue / "switches.patch").is_file()
    assert "| 02 | second | upstream has it | +1 -1 | +0 -0 |" in done.stdout


def test_a_conflict_is_told_solved_and_gone_on_from(tree: Path) -> None:
    files = SOURCES | {"src/one.cpp": "int one() {\n    return 11;\n}\n"}
    for _ in range(2):
        done = bump(tree, files)
        assert done.returncode == 2
        assert "01-first conflicts with llama.cpp of llama-cpp-python 0.0.2:\n    src/one.cpp: 1 hunk\n" in (
            done.stderr
        )
    shutil.copy(tree / "patches/llama.cpp/01-first.patch", tree / "patches/llama.cpp/00-zeroth.patch")
    assert "**to be solved**" in (work(tree) / "report.md").read_text()
    assert bump(tree, files, "--accept").returncode == 1, "not half of it"
    repository = work(tree) / "llama.cpp"
    subprocess.run(["git", "add", "src/one.cpp"], cwd=repository, check=True)
    assert bump(tree, files).returncode == 2, "the marks of the conflict are still there"
    (repository / "src" / "one.cpp").write_text("int one() {\n    return 110;\n}\n")
    subprocess.run(["git", "add", "src/one.cpp"], cwd=repository, check=True)
    done = bump(tree, files)
    assert done.returncode == 0, done.stderr
    assert outcomes(tree) == {"01-first": "by hand", "02-second": "merged", "switches": "merged"}
    assert "| 01 | first | by hand | +1 -1 | +1 -1 | src/one.cpp: 1 |" in done.stdout
    assert bump(tree, files, "--accept").returncode == 0
    assert not (tree / "patches/llama.cpp/00-zeroth.patch").exists(), "it was not moved"
    assert "+    return 110;" in (tree / "patches" / "llama.cpp" / "01-first.patch").read_text()
    assert (tree / "pyproject.toml").read_text() == f'dependencies = ["llama-cpp-python=={NEW}"]\n'


@pytest.mark.slow
def test_a_conflict_that_was_committed_by_hand(tree: Path) -> None:
    files = SOURCES | {"src/one.cpp": "int one() {\n    return 11;\n}\n"}
    assert bump(tree, files).returncode == 2
    repository = work(tree) / "llama.cpp"
    (repository / "src" / "one.cpp").write_text("int one() {\n    return 110;\n}\n")
    name = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "core.editor=true"]
    for command in (["add", "src/one.cpp"], [*name, "cherry-pick", "--continue"]):
        subprocess.run(["git", *command], cwd=repository, check=True, capture_output=True)
    assert bump(tree, files).returncode == 0
    assert outcomes(tree)["01-first"] == "by hand"


@pytest.mark.slow
def test_what_was_edited_with_a_conflict_belongs_to_its_patch(tree: Path) -> None:
    """The edit is in a file that git merged without a conflict, and was not added with `git add`."""
    files = SOURCES | {"src/one.cpp": "int one() {\n    return 11;\n}\n"}
    assert bump(tree, files).returncode == 2
    repository = work(tree) / "llama.cpp"
    (repository / "src" / "one.cpp").write_text("int one() {\n    return 110;\n}\n")
    (repository / "src" / "two.cpp").write_text("// with one\n" + SOURCES["src/two.cpp"])
    subprocess.run(["git", "add", "src/one.cpp"], cwd=repository, check=True)
    done = bump(tree, files)
    assert done.returncode == 0, done.stderr
    queue = work(tree) / "patches" / "llama.cpp"
    assert "+// with one" in (queue / "01-first.patch").read_text()
    assert "+    return 20;" in (queue / "02-second.patch").read_text()


@pytest.mark.slow
def test_a_patch_that_git_cannot_take_is_told(tree: Path) -> None:
    """There are edits after a patch was committed, in a file that the next patch changes."""
    files = SOURCES | {"src/one.cpp": "int one() {\n    return 11;\n}\n"}
    assert bump(tree, files).returncode == 2
    repository = work(tree) / "llama.cpp"
    subprocess.run(["git", "cherry-pick", "--skip"], cwd=repository, check=True, capture_output=True)
    (repository / "src" / "two.cpp").write_text("// left over\n")
    done = bump(tree, files)
    assert done.returncode == 2
    assert "02-second" in done.stderr
    assert "src/two.cpp" in done.stderr
    assert outcomes(tree) == {"01-first": "dropped", "02-second": ""}
    subprocess.run(["git", "checkout", "src/two.cpp"], cwd=repository, check=True, capture_output=True)
    assert bump(tree, files).returncode == 0


@pytest.mark.slow
def test_a_survey_counts_conflicts_and_stops_at_none(tree: Path) -> None:
    files = {
        "src/one.cpp": "int one() {\n    return 11;\n}\n",
        "src/three.cpp": SOURCES["src/three.cpp"],
    }
    done = bump(tree, files, "--survey")
    assert done.returncode == 0, done.stderr
    assert outcomes(tree, f"{NEW}-survey") == {
        "01-first": "conflict",
        "02-second": "conflict",
        "switches": "merged",
    }
    assert "2 conflicting hunks in 2 of 3 patches" in done.stdout
    assert bump(tree, files, "--accept").returncode == 1, "a survey is no queue"
    assert bump(tree, files).returncode == 2, "nor the begin of a move"


def test_a_release_whose_headers_are_elsewhere_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own test of the mask does not compile then."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    moved = import_module("bump_native").Moved(tmp_path, tmp_path, tmp_path)
    with pytest.raises(import_module("bump_sources").BumpError, match=r"test-kv-mask\.log"):
        moved.masks()
    assert "llama-" in (tmp_path / "test-kv-mask.log").read_text(), "a header of libllama"
