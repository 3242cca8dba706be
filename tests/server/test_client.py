"""The terminal client as a program with the scripted server, through a pipe and in a terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.server.api import Backend
from qwen_serve.server.attachments import AttachmentError, spoken, with_files
from qwen_serve.server.client import Conversation, ServerError, address
from tests.messages import system, user
from tests.processes import run
from tests.server.api.conftest import Server, Start, starter
from tests.server.seeing import needs_vision, noise
from tests.server.serving import Served
from tests.waiting import wait_until

THOUGHT = "Hmm, 🤔.\n</think>\n\nTwo."


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starter(tmp_path) as start:
        yield start


def client(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "qwen_serve.server.client", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **{**pipes, **options})


def ask(server: Server, text: str, *arguments: str) -> str:
    output, errors = client("--url", server.url, *arguments).communicate(text, timeout=60)
    assert not errors, errors
    return output


def thinks(prompt: str) -> str:
    return THOUGHT if prompt.endswith("<think>\n") else "plain"


def test_one_question(start: Start) -> None:
    server = start(thinks)
    assert ask(server, "", "What", "is 1+1?", "--system", "Be brief.") == "Two.\n", (
        "its reasoning is not piped"
    )
    assert "What is 1+1?<|im_end|>" in server.engine.submissions[0].text
    assert "Be brief." in server.engine.submissions[0].text


def test_what_is_piped_in_is_one_question(start: Start) -> None:
    server = start(thinks)
    assert ask(server, "one\n\n/new\n", "Sum up:", "--no-think") == "plain\n"
    assert "Sum up:\n\none\n\n/new<|im_end|>" in server.engine.submissions[0].text
    assert ask(server, "only this\n", "--no-think") == "plain\n"
    assert "only this<|im_end|>" in server.engine.submissions[1].text


def test_nothing_to_ask(start: Start) -> None:
    program = client("--url", start("x").url)
    output, errors = program.communicate("", timeout=60)
    assert (output, program.returncode) == ("", 1)
    assert "nothing to ask" in errors


def test_a_refusal_is_shown(start: Start) -> None:
    program = client("--url", start("fine", context_size=200).url)
    _, errors = program.communicate("x" * 300, timeout=60)
    assert "error: the prompt has" in errors
    assert program.returncode == 1


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
        assert go.wait(60)
        return backend

    server = start("Two.", load=load)
    asking = client("--url", server.url, "--no-think", "1+1?", stdin=subprocess.DEVNULL)
    assert asking.stderr is not None
    try:
        assert "loading" in asking.stderr.readline()
    finally:
        go.set()
    output, _ = asking.communicate(timeout=60)
    assert output.strip() == "Two."


class Terminal:
    """A program in a terminal: its output, and input for it."""

    def __init__(self) -> None:
        self._ours, self.program_side = pty.openpty()
        self._unread = ""

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read_until(self, text: str) -> str:
        """The output up to and including `text`. Later calls continue after it."""
        deadline = time.monotonic() + 60
        while text not in self._unread:
            ready, _, _ = select.select([self._ours], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come: {self._unread!r}"
            self._unread += os.read(self._ours, 1024).decode("utf-8", "replace")
        before, found, self._unread = self._unread.partition(text)
        return before + found

    def close(self) -> None:
        os.close(self.program_side)
        os.close(self._ours)


@contextmanager
def in_terminal(
    server: Server, home: Path, *arguments: str
) -> Iterator[tuple[Terminal, subprocess.Popen[str]]]:
    """The client in a terminal, at its first prompt."""
    terminal = Terminal()
    side = terminal.program_side
    program = client(
        "--url",
        server.url,
        *arguments,
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        env={**os.environ, "XDG_STATE_HOME": str(home), "TERM": "dumb"},
    )
    try:
        assert "fake at http://" in terminal.read_until("/help lists commands")
        terminal.read_until("> ")
        yield terminal, program
    finally:
        program.kill()
        program.wait()
        terminal.close()


def test_in_a_terminal(start: Start, tmp_path: Path) -> None:
    server = start(lambda prompt: THOUGHT if "1+1" in prompt else "on and on " * 200, delay=0.005)
    with in_terminal(server, tmp_path) as (terminal, program):
        terminal.type(b"Count.\n")
        terminal.read_until("on and on")
        program.send_signal(signal.SIGINT)
        terminal.read_until("[stopped]")
        wait_until(lambda: not server.engine.running)
        assert server.engine.submissions[0].cancelled, "Ctrl-C frees the sequence"
        terminal.type(b"1+1?\n")
        terminal.read_until("\x1b[2mHmm")
        terminal.read_until("\x1b[0mTwo.")
        figures = terminal.read_until("prompt tokens cached")
        assert "tok/s" in figures
        terminal.read_until("> ")
        terminal.type(b"\x04")
        assert program.wait(30) == 0
    assert "1+1?" in (tmp_path / "qwen-serve" / "history").read_text()


def test_commands(start: Start, tmp_path: Path) -> None:
    server = start(thinks)
    saved = tmp_path / "talk.md"
    with in_terminal(server, tmp_path, "--no-think") as (terminal, program):

        def enter(line: str, reply: str) -> None:
            terminal.type(line.encode() + b"\n")
            if reply:
                terminal.read_until(reply)
            terminal.read_until("> ")

        enter("/help", "save the conversation")
        enter("a", "plain")
        enter("/thnik", "/thnik is not a command; did you mean /think?")
        enter("/etc/passwd is what?", "/etc/passwd is not a command")
        enter("/think maybe", "on or off")
        enter("/think", "thinking is on")
        enter("b", "Hmm")
        enter(f"/save {saved}", "saved to")
        enter("/save /no/such/folder/x.md", "No such file")
        enter("/system Be brief.", "")
        enter("/new", "")
        enter("/think off", "thinking is off")
        terminal.type(b'"""c\nd"""\n')
        terminal.read_until("plain")
        terminal.type(b"/exit\n")
        assert program.wait(30) == 0
    assert len(server.engine.submissions) == 3, "commands are not sent"
    second, third = (entry.text for entry in server.engine.submissions[1:])
    assert "a<|im_end|>" in second
    assert "c\nd<|im_end|>" in third
    assert "Be brief." in third
    assert "a<|im_end|>" not in third
    assert (
        saved.read_text() == "## user\n\na\n\n## assistant\n\nplain\n\n## user\n\nb\n\n## assistant\n\nTwo.\n"
    )


def test_a_conversation_as_messages(tmp_path: Path) -> None:
    conversation = Conversation("http://x", think=True, system="S", messages=[user("é")])
    conversation.save(tmp_path / "talk.json")
    assert json.loads((tmp_path / "talk.json").read_text(encoding="utf-8")) == [system("S"), user("é")]
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


def test_the_command_qwen_serve(start: Start) -> None:
    url = start("</think>\n\nTwo.").url
    command = [sys.executable, "-m", "qwen_serve.server.cli", "chat", "--url", url, "1+1?"]
    done = run(command, stdin=subprocess.DEVNULL, check=True)
    assert done.stdout == "Two.\n"


def test_a_conversation_keeps_what_there_is_of_a_reply(start: Start) -> None:
    server = start("one two three", delay=0.005)
    conversation = Conversation(server.url, think=False)
    reply = conversation.ask("Count.")
    heard = next(reply)[1]
    reply.close()
    assert conversation.messages == [user("Count."), {"role": "assistant", "content": heard}]
    wait_until(lambda: not server.engine.running)


def test_a_question_without_an_answer_is_forgotten(start: Start) -> None:
    conversation = Conversation(start("x", context_size=100).url, think=False)
    with pytest.raises(ServerError, match="the prompt has"):
        list(conversation.ask("x" * 500))
    assert conversation.messages == []


def test_a_picture_is_named_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"one")
    (tmp_path / "my cat.JPG").write_bytes(b"two")
    told = with_files(f'Look @{tmp_path}/a.png and @"{tmp_path}/my cat.JPG": who is @her, a@b.png?')
    assert isinstance(told, list)
    url = "data:image/{};base64,{}".format
    assert told == [
        {"type": "text", "text": "Look "},
        {"type": "image_url", "image_url": {"url": url("png", "b25l")}},
        {"type": "text", "text": " and "},
        {"type": "image_url", "image_url": {"url": url("jpeg", "dHdv")}},
        {"type": "text", "text": ": who is @her, a@b.png?"},
    ]
    assert spoken(told) == "Look [picture] and [picture] : who is @her, a@b.png?"
    assert with_files("an @property") == "an @property"
    with pytest.raises(AttachmentError, match=r"none\.png: No such file"):
        with_files("@none.png")


def test_a_text_file_is_read_or_refused(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("one ``` two\n")
    (tmp_path / "wide.txt").write_text("drei", encoding="utf-16")
    (tmp_path / "a.bin").write_bytes(b"\xff\x00")
    (tmp_path / "a.png").write_bytes(b"one")
    block = "notes.md\n\n````\none ``` two\n````"
    assert with_files(f"Sum up @{notes}, please.") == f"{block}\n\nSum up notes.md, please."
    both = with_files(f"@{tmp_path}/wide.txt and @{tmp_path}/a.png")
    assert [part.get("text") for part in both if isinstance(part, dict)] == [
        "wide.txt\n\n```\ndrei\n```",
        "wide.txt and ",
        None,
    ]
    for word, why in (
        (f"{tmp_path}/a.bin", "neither a picture"),
        (f"{tmp_path}", "Is a directory"),
        ("nowhere.md", "No such file"),
        ('"no notes"', "No such file"),
        ("./nowhere", "No such file"),
    ):
        with pytest.raises(AttachmentError, match=why):
            with_files(f"What is @{word}?")
    assert with_files("@app.route is a decorator of @someone.") == "@app.route is a decorator of @someone."


@pytest.mark.parametrize("form", ["{host}", "{host}/v1", "http://{host}/v1/", "http://{host}/"])
def test_the_address_may_be_short(start: Start, form: str) -> None:
    url = start("</think>\n\nTwo.").url.rstrip("/")
    assert address(form.format(host=url.removeprefix("http://"))) == url


def test_an_address_that_is_none_is_refused() -> None:
    for wrong in ("ftp://x", "localhost:99999", "http://", "localhost:x"):
        with pytest.raises(ServerError, match=r"--url .*want an address such as localhost:8080"):
            address(wrong)
    _, errors = client("--url", "ftp://x", "Hi").communicate("", timeout=60)
    assert errors.startswith("--url ftp://x: want an address")


@needs_vision
def test_a_picture_is_asked_about(seeing: Served, tmp_path: Path) -> None:
    noise(1).save(tmp_path / "a.png")
    encoder = seeing.engine.encoder
    assert encoder is not None
    before = encoder.encoded
    arguments = [
        "--url",
        seeing.url,
        "--max-tokens",
        "4",
        "--no-think",
        f"What is @{tmp_path}/a.png",
        "here?",
    ]
    output, errors = client(*arguments).communicate("and @this.png?", timeout=60)
    assert output.strip()
    assert not errors
    assert encoder.encoded == before + 1
    _, errors = client("--url", seeing.url, "@none.png").communicate("", timeout=60)
    assert "none.png: No such file" in errors
