"""Coding agents work on files and commands with a server whose model is scripted. Their tool calls and
results pass through the API formats that they use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.bench.clients.catalogue import CLIENTS
from qwen_serve.bench.clients.run import environment, execute
from qwen_serve.bench.clients.snippets import read_snippets
from tests.server.api.conftest import Start, starter

pytestmark = pytest.mark.slow

RUN = "cp notes.txt copied.txt && wc -c copied.txt"
INSTALLED = Path.home() / ".cache" / "qwen-bench" / "clients"
"""Where `qwen-bench conformance clients` has them; tests have a cache of their own."""

TASK = "Change one to two in notes.txt, copy it to copied.txt, and count its bytes."

Calls = list[tuple[str, dict[str, Any]]]


def opencode(file: str) -> Calls:
    return [
        ("read", {"filePath": file}),
        ("edit", {"filePath": file, "oldString": "one", "newString": "two"}),
        ("bash", {"command": RUN, "description": "Copies and counts"}),
    ]


def claude_code(file: str) -> Calls:
    return [
        ("Read", {"file_path": file}),
        ("Edit", {"file_path": file, "old_string": "one", "new_string": "two"}),
        ("Bash", {"command": RUN}),
    ]


def codex(_: str) -> Calls:
    return [("exec_command", {"cmd": cmd}) for cmd in ("cat notes.txt", "sed -i s/one/two/ notes.txt", RUN)]


def continue_(file: str) -> Calls:
    return [
        ("Read", {"filepath": file}),
        ("MultiEdit", {"file_path": file, "edits": [{"old_string": "one", "new_string": "two"}]}),
        ("Bash", {"command": RUN}),
    ]


AGENTS = {
    "opencode": ("run", opencode, ""),
    "claude-code": ("print", claude_code, "--permission-mode acceptEdits --allowedTools Bash"),
    "codex": ("exec", codex, "--dangerously-bypass-approvals-and-sandbox"),
    "continue": ("print", continue_, ""),
}
"""The snippet of docs/clients.md that is run, the calls, and further options."""


def written(name: str, arguments: dict[str, Any]) -> str:
    """A tool call in Qwen3.5's format."""
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starter(tmp_path) as start:
        yield start


@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", AGENTS)
def test_a_file_is_changed_and_a_command_run(start: Start, client: str, tmp_path: Path) -> None:
    name, calls_of, options = AGENTS[client]
    folder = INSTALLED / client
    if not (folder / "node_modules").is_dir():
        pytest.skip(f"qwen-bench conformance clients --only '{client}.*' installs it, and has not")
    work = tmp_path / "work"
    work.mkdir()
    (work / "notes.txt").write_text("one\n")
    calls = calls_of(str(work / "notes.txt"))
    prompts: list[str] = []

    def model(prompt: str) -> str:
        if f'"name": "{calls[0][0]}"' not in prompt:  # it is offered no tools: a title, say
            return "A task"
        prompts.append(prompt)
        step = prompt.count("<|im_start|>user\n<tool_response>")
        thought = "Well.</think>\n\n" if prompt.endswith("<think>\n") else ""
        return thought + (written(*calls[step]) if step < len(calls) else "It has 4 bytes.")

    url = start(model, context_size=10**6).url.rstrip("/")
    [snippet] = [each for each in read_snippets() if (each.client, each.name) == (client, name)]
    script = snippet.pointed_at(url, "none", work).replace('"Say hello."', f'"{TASK}" {options}')
    script = script.replace("32768", "1000000")  # of a token for each byte
    variables = environment(CLIENTS[client], folder, str(work))
    status, printed, errors = execute(["bash", "-e", "-c", script], work, variables, 120)
    assert status == 0, (printed, errors)
    assert "It has 4 bytes." in printed
    assert (work / "notes.txt").read_text() == (work / "copied.txt").read_text() == "two\n"
    results = prompts[-1].split("<tool_response>")[-3:]
    assert "one" in results[0]
    assert "4 copied.txt" in results[2]
