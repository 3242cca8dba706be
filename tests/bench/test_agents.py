"""Coding agents work on files and commands with a server whose model is scripted. Their tool calls and
results pass through the API formats that they use."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.bench.clients.catalogue import CLIENTS
from qwen_serve.bench.clients.run import environment, execute
from qwen_serve.bench.clients.snippets import read_snippets
from qwen_serve.server.engine import GenerateRequest
from tests.server.api.conftest import Start, starter
from tests.server.api.fakes import FakeEngine, FakeVocab
from tests.server.api.formats.test_replies import ids

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


def qwen_code(file: str) -> Calls:
    background = {"is_background": False, "description": "Runs"}
    return [
        ("read_file", {"file_path": file}),
        ("edit", {"file_path": file, "old_string": "one", "new_string": "two"}),
        ("run_shell_command", {"command": RUN, **background}),
    ]


def cline(file: str) -> Calls:
    return [
        ("read_files", {"files": [{"path": file}]}),
        ("editor", {"path": file, "old_text": "one", "new_text": "two"}),
        ("run_commands", {"commands": [RUN]}),
    ]


AGENTS = {
    "opencode": ("run", opencode, ""),
    "claude-code": ("print", claude_code, "--permission-mode acceptEdits --allowedTools Bash"),
    "codex": ("exec", codex, "--dangerously-bypass-approvals-and-sandbox"),
    "continue": ("print", continue_, ""),
    "qwen-code": ("print", qwen_code, "--yolo"),
    "cline": ("print", cline, ""),
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


def run(client: str, start: Start, model: Callable[[str], Any], work: Path) -> tuple[int | None, str, str]:
    """Gives the task to an agent, in `work`; as `execute`."""
    name, calls_of, options = AGENTS[client]
    folder = INSTALLED / client
    if not (folder / "node_modules").is_dir():
        pytest.skip(f"qwen-bench conformance clients --only '{client}.*' installs it, and has not")
    work.mkdir()
    (work / "notes.txt").write_text("one\n")
    first_tool = calls_of("")[0][0]

    def script(prompt: str) -> Any:
        if f'"name": "{first_tool}"' not in prompt:  # it is offered no tools: a title, say
            return "A task"
        return model(prompt)

    url = start(script, context_size=10**6).url.rstrip("/")
    [snippet] = [each for each in read_snippets() if (each.client, each.name) == (client, name)]
    text = snippet.pointed_at(url, "none", work).replace('"Say hello."', f'"{TASK}" {options}')
    text = text.replace("32768", "1000000")  # of a token for each byte
    variables = environment(CLIENTS[client], folder, str(work))
    return execute(["bash", "-e", "-c", text], work, variables, 240)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", AGENTS)
def test_a_file_is_changed_and_a_command_run(start: Start, client: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    calls = AGENTS[client][1](str(work / "notes.txt"))
    prompts: list[str] = []

    def model(prompt: str) -> str:
        prompts.append(prompt)
        step = prompt.count("<|im_start|>user\n<tool_response>")
        thought = "Well.</think>\n\n" if prompt.endswith("<think>\n") else ""
        return thought + (written(*calls[step]) if step < len(calls) else "It has 4 bytes.")

    status, printed, errors = run(client, start, model, work)
    assert status == 0, (printed, errors)
    assert "It has 4 bytes." in printed
    assert (work / "notes.txt").read_text() == (work / "copied.txt").read_text() == "two\n"
    results = prompts[-1].split("<tool_response>")[-3:]
    assert "one" in results[0]
    assert "4 copied.txt" in results[2]


class Cutting(FakeEngine):
    """Ends a reply that ends in CUT as a token limit does."""

    def submit(self, request: GenerateRequest) -> Any:
        script = self.script
        reply = script(self.text(request.prompt.ids))
        if isinstance(reply, str) and reply.endswith(CUT):
            reply = reply.removesuffix(CUT)
            request = replace(request, max_tokens=len(FakeVocab().tokenize(reply, special=True)))
        self.script = lambda _: reply
        try:
            return super().submit(request)
        finally:
            self.script = script


CUT = "<cut>"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", AGENTS)
def test_it_goes_on_after_a_cut_call_a_drifted_one_and_quoted_tags(
    start: Start, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.server.api.conftest.FakeEngine", Cutting)
    work = tmp_path / "work"
    read, *_, last = AGENTS[client][1](str(work / "notes.txt"))
    asked: list[str] = []

    def model(prompt: str) -> Any:
        asked.append(prompt)
        thinks = prompt.endswith("<think>\n")
        quoted = "It says ⟦</think>⟧ and ⟦<tool_call>⟧."
        thought = f"{quoted}\n</think>\n\n" if thinks else ""
        steps = [
            thought + written(*last).replace("</function>\n</tool_call>", ""),
            thought + written(*read).partition("\n</parameter>")[0][:-4] + CUT,
            thought + f"{quoted}\n" + written(*read).replace("\n</parameter>\n</function>", "\n</function>"),
            thought + "It has 4 bytes.",
        ]
        if client == "codex":  # a cut answer ends it
            del steps[1]
        reply = steps[min(len(asked), len(steps)) - 1]
        return reply if reply.endswith(CUT) else ids(reply)

    status, printed, errors = run(client, start, model, work)
    assert status == 0, (printed, errors)
    assert "It has 4 bytes." in printed
    assert (work / "copied.txt").read_text() == "one\n"
    assert "one" in asked[-1].rpartition("<tool_response>")[2]
