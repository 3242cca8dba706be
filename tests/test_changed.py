"""`make check` finds the tests of a file."""

import subprocess
from pathlib import Path

import pytest

from tests.changed import ROOT, changed, chosen, covering, importers


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("qwen_serve/server/engine/outputs.py", "tests/server/engine/test_outputs.py"),  # by its name
        ("qwen_serve/server/engine/states/rollback.py", "tests/server/engine/states/test_rollback.py"),
        ("qwen_serve/convert/imatrix.py", "tests/convert/test_quantize.py"),  # by what a test imports
        ("qwen_serve/server/api/serving.py", "tests/server/api/test_failures.py"),  # by its folder
        ("qwen_serve/bench/load/words.txt", "tests/bench/load/test_prompts.py"),
        ("bench/sweep.py", "tests/bench/test_entries.py"),
        ("server/__main__.py", "tests/test_doors.py"),
        ("deploy/compose.single.yaml", "tests/test_deploy.py"),
        ("chat_templates/qwen3_5.jinja", "tests/chat_templates/test_templates.py"),
        ("qwen_serve/server/page/chat.js", "tests/server/page/test_chat.py"),
        ("CONTRIBUTING.md", "tests/test_docs.py"),
        ("Makefile", "tests/test_packaging.py"),
        ("tests/test_rooms.py", "tests/test_rooms.py"),
        ("tests/checkpoints.py", "tests/convert/test_pipeline.py"),
    ],
)
def test_a_file_has_its_tests(path: str, found: str) -> None:
    assert found in covering(path)


def test_every_source_file_has_some_and_they_are_there() -> None:
    for room in ("server", "convert", "bench"):
        files = sorted((ROOT / "qwen_serve" / room).rglob("*.py"))
        assert files, room
        for path in (*files, *(ROOT / room).glob("*.py")):
            tests = covering(path.relative_to(ROOT).as_posix())
            assert tests, path
            assert all((ROOT / test).is_file() for test in tests)


def test_names_are_followed_through_their_package() -> None:
    """`from qwen_serve.server.engine import Vocab` is an import of engine/vocab.py."""
    assert "tests/server/engine/test_vocab.py" in importers()["qwen_serve/server/engine/vocab.py"]


def test_changes_are_those_of_the_tree_and_of_its_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.changed.ROOT", tmp_path)

    def git(*command: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    (tmp_path / "old").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    git("checkout", "-b", "branch")
    (tmp_path / "committed").write_text("1")
    git("add", ".")
    git("commit", "-m", "two")
    assert changed("main") == ["committed"]
    (tmp_path / "old").write_text("2")
    (tmp_path / "new").write_text("1")
    assert changed("main") == ["committed", "new", "old"]
    with pytest.raises(SystemExit, match="nowhere"):
        changed("nowhere")


def test_the_rules_of_the_tree_are_always_among_them() -> None:
    assert [*chosen(["docs/metrics.md"])] == ["tests/test_docs.py", "tests/test_rooms.py"]
