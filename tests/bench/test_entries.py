"""Each command can be run through each of its entry points."""

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest

from qwen_serve.bench.cli import COMMANDS, main, make_app
from tests.marks import slow_but
from tests.processes import run

ROOT = Path(__file__).parents[2]
ENTRIES = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if path.stem in COMMANDS)
NAMES = [*COMMANDS, *(f"{name} {part}" for name, one in COMMANDS.items() for part in one.parts)]


def test_the_documented_files_are_there() -> None:
    assert set(ENTRIES) == {"latency", "throughput", "quality", "sweep"}


@pytest.mark.parametrize("name", slow_but(["latency"], ENTRIES))
def test_a_file_is_its_command(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / f"{name}.py"), "--help"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: qwen-bench {name} ")


@pytest.mark.parametrize("name", NAMES)
def test_each_has_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: qwen-bench {name}")
    assert len(shown.splitlines()) > 5
    parts = COMMANDS[name].parts if name in COMMANDS else {}
    assert all(one.what[:40] in shown for one in parts.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_help_begins_with_examples_that_the_command_takes(name: str) -> None:
    command = COMMANDS[name] if name in COMMANDS else COMMANDS[name.split()[0]].parts[name.split()[1]]
    if command.where is None:
        return
    module, _, function = command.where.partition(":")
    text = getattr(import_module(module), function).__doc__
    summary, examples = text.split("\n\n")[:2]
    assert summary
    found = [" ".join(one.split()) for one in re.findall(r"- `(qwen-bench [^`]+)`", examples)]
    assert found
    for example in found:
        words = shlex.split(example)[1:]
        assert words[: len(name.split())] == name.split()
        _, bound, *_ = make_app(words).parse_args(words, exit_on_error=False)
        assert bound.arguments or bound.kwargs


def test_help_names_all_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    with pytest.raises(SystemExit) as exit:
        main(["nothing"])
    assert exit.value.code == 2


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_without_the_extras_it_says_what_to_install(arguments: list[str]) -> None:
    """An interpreter without site-packages simulates an environment without extras."""
    for file in ("latency", "__main__"):
        command = [sys.executable, "-S", str(ROOT / "bench" / f"{file}.py"), *arguments]
        done = run(command)
        shown = done.stdout + done.stderr
        assert "Traceback" not in shown
        assert "pip install 'qwen-serve[bench]'" in shown
        assert "One request at a time" in shown
        assert done.returncode == (0 if arguments or file == "__main__" else 1)
