"""The clients' page and the catalogue agree, and the outcomes of snippets are reported correctly."""

import sys
from pathlib import Path

import pytest

from qwen_serve.bench.clients import environment, run
from qwen_serve.bench.clients.catalogue import CLIENTS, ClientProgram
from qwen_serve.bench.clients.run import ServedTo, attempt, execute, last_line
from qwen_serve.bench.clients.snippets import URL, Snippet, read_snippets
from qwen_serve.bench.errors import BenchError
from tests.processes import ends


def test_every_snippet_has_a_check_and_every_check_a_snippet() -> None:
    shown = [(snippet.client, snippet.name) for snippet in read_snippets()]
    assert len(shown) == len(set(shown))
    assert set(shown) == {(client, name) for client, program in CLIENTS.items() for name in program.checks}


def test_every_snippet_names_a_server() -> None:
    for snippet in read_snippets():
        pointed = snippet.pointed_at("http://other:1", "secret", Path("/tasks"))
        assert "http://other:1" in pointed
        assert URL not in pointed
        if snippet.language == "python":
            compile(pointed, snippet.label, "exec")
            assert 'secret"' in pointed
        assert "Bearer none" not in pointed


def test_a_setup_goes_in_front_of_the_others(tmp_path: Path) -> None:
    page = tmp_path / "clients.md"
    page.write_text("```bash a.setup\nx=1\n```\ntext\n```bash a.b\necho $x\n```\n```\nnot one\n```\n")
    assert read_snippets(page) == [Snippet("a", "b", "bash", "x=1\necho $x\n")]
    with pytest.raises(BenchError, match="run this from a checkout"):
        read_snippets(tmp_path / "none.md")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one client, `mine`, whose interpreter is this one."""
    (tmp_path / "mine" / "bin").mkdir(parents=True)
    (tmp_path / "mine" / "bin" / "python").symlink_to(sys.executable)
    checks = {"good": "assert answer == 42", "printing": "assert printed == 'hi\\n', printed"}
    program = ClientProgram(pip=("mine",), checks=checks)
    monkeypatch.setitem(CLIENTS, "mine", program)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "language", "text", "status", "detail"),
    [
        ("good", "python", "answer = 42", "pass", ""),
        ("good", "python", "answer = 41", "FAIL", "AssertionError"),
        ("good", "python", "raise ValueError('no')", "FAIL", "ValueError: no"),
        ("printing", "bash", "echo hi", "pass", ""),
        ("printing", "bash", "echo ho", "FAIL", "AssertionError: ho"),
        ("printing", "bash", "false; echo hi", "FAIL", "exit status 1"),
        ("good", "python", "import time; time.sleep(60)", "FAIL", "not done within 1 s"),
    ],
)
def test_outcomes(cache: Path, name: str, language: str, text: str, status: str, detail: str) -> None:
    limit = 1 if "sleep" in text else 30
    outcome = attempt(Snippet("mine", name, language, text), ServedTo(timeout=limit), cache)
    assert (outcome.status, detail in outcome.detail) == (status, True), outcome


def test_nothing_outlives_its_snippet(tmp_path: Path) -> None:
    command = ["bash", "-c", "sleep 300 & echo $!"]
    status, printed, _ = execute(command, tmp_path, {"PATH": "/usr/bin:/bin"}, 10)
    assert status == 0
    assert ends(int(printed))


def test_keys_of_other_services_stay_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    made = run.environment(ClientProgram(pip=("x",), checks={}), tmp_path, "/work")
    assert "OPENAI_API_KEY" not in made
    assert made["HOME"] == "/work"


def test_an_error_is_found() -> None:
    text = "Traceback\n  File x\nopenai.BadRequestError: Error code: 400 - no\n\n╰────╯\nbye\n"
    assert last_line(text) == "openai.BadRequestError: Error code: 400 - no"


def test_what_is_installed_is_not_installed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(environment, "run", lambda command, _: asked.append(command))
    for packages in (("a",), ("a",), ("b",)):
        environment.install(ClientProgram(npm=packages, checks={}), tmp_path)
    assert [command[-1] for command in asked] == ["a", "b"]
