"""The terminal client, as a program: against the scripted server, through a pipe and through a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.api import Backend
from server.client import Conversation, ServerError
from tests.server.api.conftest import Server, Start, starter, wait_until

THOUGHT = "Hmm, 🤔.\n</think>\n\nTwo."


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starter(tmp_path) as start:
        yield start


def client(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "server.client", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **{**pipes, **options})


def ask(server: Server, text: str, *arguments: str) -> str:
    output, errors = client("--url", server.url, *arguments).communicate(text, timeout=60)
    assert not errors, errors
    return output


def test_piped_questions_share_a_conversation(start: Start) -> None:
    server = start(lambda prompt: THOUGHT if prompt.endswith("<think>\n") else "plain")
    assert (
        ask(server, "What is 1+1?\n\nAnd again?\n", "--system", "Be brief.")
        == "Hmm, 🤔.\n\nTwo.\n" * 2 + "\n"
    )
    first, second = (entry.text for entry in server.engine.submissions)
    assert "Be brief." in first
    assert "And again?" in second
    assert "Two.<|im_end|>" in second, "the first answer belongs to the second question's history"
    assert "Hmm" not in second, "its reasoning does not"


def test_switches(start: Start) -> None:
    server = start(lambda prompt: THOUGHT if prompt.endswith("<think>\n") else "plain")
    assert ask(server, "a\n/think\nb\n/new\nc\n", "--no-think").startswith("plain\nHmm")
    last = server.engine.submissions[-1].text
    assert "c<|im_end|>" in last
    assert "a<|im_end|>" not in last


def test_a_refusal_is_shown_and_survived(start: Start) -> None:
    server = start("fine", context_size=200)
    output, errors = client("--url", server.url).communicate("x" * 300 + "\nhello\n", timeout=60)
    assert "error: the prompt has" in errors
    assert output.strip() == "fine"


def test_a_reply_cannot_drive_the_terminal(start: Start) -> None:
    assert ask(start("a\x1b[2Jb\x07\tc\x9bd\n"), "x\n", "--no-think").startswith("a[2Jb\tcd\n")


def test_no_server() -> None:
    output, errors = client("--url", "http://127.0.0.1:9", "--wait", "0").communicate("x\n", timeout=60)
    assert not output
    assert "no server at http://127.0.0.1:9" in errors
    assert "Traceback" not in errors


def test_it_waits_while_the_model_loads(start: Start) -> None:
    go = threading.Event()

    def load(backend: Backend) -> Backend:
        assert go.wait(30)
        return backend

    server = start("Two.", load=load)
    asking = client("--url", server.url, "--no-think")
    assert asking.stderr is not None
    try:
        assert "loading" in asking.stderr.readline()
    finally:
        go.set()
    output, _ = asking.communicate("1+1?\n", timeout=60)
    assert output.strip() == "Two."


class Terminal:
    """What a program in a terminal shows, and a keyboard for it."""

    def __init__(self) -> None:
        self._ours, self.program_side = pty.openpty()
        self._unread = ""

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read_until(self, text: str) -> str:
        """What is shown up to and including `text`; later calls go on behind it."""
        deadline = time.monotonic() + 30
        while text not in self._unread:
            ready, _, _ = select.select([self._ours], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come: {self._unread!r}"
            self._unread += os.read(self._ours, 1024).decode("utf-8", "replace")
        before, found, self._unread = self._unread.partition(text)
        return before + found

    def close(self) -> None:
        os.close(self.program_side)
        os.close(self._ours)


def test_in_a_terminal(start: Start) -> None:
    server = start(lambda prompt: THOUGHT if "1+1" in prompt else "on and on " * 200, delay=0.005)
    terminal = Terminal()
    side = terminal.program_side
    program = client("--url", server.url, stdin=side, stdout=side, stderr=side, start_new_session=True)
    try:
        terminal.read_until("> ")
        terminal.type(b"Count.\n")
        terminal.read_until("on and on")
        program.send_signal(signal.SIGINT)
        terminal.read_until("[stopped]")
        wait_until(lambda: not server.engine.running)
        assert server.engine.submissions[0].cancelled, "Ctrl-C frees the sequence"
        terminal.type(b"1+1?\n")
        terminal.read_until("\x1b[2mHmm")
        terminal.read_until("\x1b[0mTwo.")
        terminal.read_until("> ")
        terminal.type(b"\x04")
        assert program.wait(30) == 0
    finally:
        program.kill()
        program.wait()
        terminal.close()


def test_a_conversation_keeps_what_there_is_of_a_reply(start: Start) -> None:
    server = start("one two three", delay=0.005)
    conversation = Conversation(server.url, think=False)
    reply = conversation.ask("Count.")
    heard = next(reply)[1]
    reply.close()
    assert conversation.messages == [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": heard},
    ]
    wait_until(lambda: not server.engine.running)


def test_a_question_without_an_answer_is_forgotten(start: Start) -> None:
    conversation = Conversation(start("x", context_size=100).url, think=False)
    with pytest.raises(ServerError, match="the prompt has"):
        list(conversation.ask("x" * 500))
    assert conversation.messages == []
