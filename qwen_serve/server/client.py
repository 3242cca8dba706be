"""`qwen-serve chat`: a conversation in the terminal, thinking shown dimmed as it streams; or one question."""

import argparse
import contextlib
import difflib
import json
import os
import re
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from qwen_serve.common.files import write_text
from qwen_serve.server.attachments import AttachmentError, Content, spoken, with_files

DIM, RESET = "\x1b[2m", "\x1b[0m"
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters are removed from replies: escape sequences could control the terminal."""

PING_S = 0.5
CONNECT_S = 5

COMMANDS = {
    "/help": "show this text",
    "/new": "begin a new conversation",
    "/think": "switch thinking: /think on, /think off, or /think to toggle",
    "/system": "set the system message: /system TEXT; /system alone removes it",
    "/save": "save the conversation: /save FILE.md, or FILE.json for its messages",
    "/exit": "leave (Ctrl-D)",
}
HELP = (
    "\n".join([f"{name:9}{what}" for name, what in COMMANDS.items()])
    + """
@FILE    in a message: send a picture (.png, .jpg, .webp, .gif) or a text file; with spaces: @"my cat.png"
Ctrl-C   stop the reply
\"\"\"      begins and ends a message of several lines; a line that ends with \\ continues on the next
To send a message that begins with /, put a space before it."""
)

HISTORY_LINES = 1000


class ServerError(Exception):
    """The server refused a request or broke off a reply; the message is the server's."""


@dataclass
class Conversation:
    """The messages so far, and the server that continues them."""

    url: str
    think: bool
    system: str | None = None
    max_tokens: int | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The messages, without the system message."""
    figures: str = ""
    """Tokens, speed and cache of the last reply, if it was complete."""

    def __post_init__(self) -> None:
        self.session = requests.Session()
        if key := os.environ.get("QWEN_API_KEY"):
            self.session.headers["Authorization"] = f"Bearer {key}"

    def model(self) -> str:
        """The server's name for its model. Raises ServerError."""
        try:
            response = self.session.get(f"{self.url}/v1/models", timeout=CONNECT_S)
        except requests.RequestException as error:
            raise ServerError(f"the connection to {self.url} broke: {error}") from error
        if not response.ok:
            raise ServerError(error_message(response))
        return str(response.json()["data"][0]["id"])

    @property
    def _system(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def save(self, path: Path) -> None:
        """Writes the conversation as Markdown or, for *.json, as messages. Raises OSError."""
        messages = [*self._system, *self.messages]
        if path.suffix == ".json":
            text = json.dumps(messages, indent=2, ensure_ascii=False) + "\n"
        else:
            parts = [
                f"## {message['role']}\n\n{spoken(message['content']).strip()}\n" for message in messages
            ]
            text = "\n".join(parts)
        write_text(path, text)

    def ask(self, content: Content) -> Generator[tuple[str, str], None, None]:
        """Sends a user's message; yields ("reasoning" | "content", text) as the reply arrives.

        The answer becomes part of the conversation even if the reply breaks off. A question without any
        answer does not. Raises ServerError.
        """
        question = {"role": "user", "content": content}
        body: dict[str, Any] = {
            "messages": [*self._system, *self.messages, question],
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": self.think},
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        answer = self.figures = ""
        try:
            for delta in self._stream(body):
                if reasoning := delta.get("reasoning_content"):
                    yield "reasoning", reasoning
                if text := delta.get("content"):
                    answer += text
                    yield "content", text
        finally:
            if answer:
                self.messages += [question, {"role": "assistant", "content": answer}]

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        timings: dict[str, Any] = {}
        try:
            with self.session.post(
                f"{self.url}/v1/chat/completions", json=body, stream=True, timeout=(CONNECT_S, None)
            ) as response:
                if not response.ok:
                    raise ServerError(error_message(response))
                for line in response.iter_lines():
                    if not line.startswith(b"data: ") or line == b"data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise ServerError(event["error"]["message"])
                    timings = event.get("timings") or timings
                    if usage := event.get("usage"):
                        self.figures = figures_of(usage, timings)
                    for choice in event["choices"]:
                        yield choice["delta"]
        except requests.RequestException as error:
            raise ServerError(f"the connection to {self.url} broke: {error}") from error


def address(given: str) -> str:
    """The server's address, which may lack http:// and may end in /v1. Raises ServerError."""
    url = given if "://" in given else f"http://{given}"
    url = re.sub(r"(/v1)?/*$", "", url)
    parts = urlsplit(url)
    try:
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is none
        fine = False
    if not fine:
        raise ServerError(f"--url {given}: want an address such as localhost:8080 or https://example.com")
    return url


def figures_of(usage: dict[str, Any], timings: dict[str, Any]) -> str:
    """A reply's figures: tokens, speed, cache. `timings` are llama-server's; {} from other servers."""
    parts = [f"{usage['completion_tokens']} tokens"]
    if speed := timings.get("predicted_per_second"):
        parts.append(f"{speed:.1f} tok/s")
    if timings:
        parts.append(f"first after {timings.get('queue_ms', 0) + timings.get('prompt_ms', 0):.0f} ms")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    parts.append(f"{cached} of {usage['prompt_tokens']} prompt tokens cached")
    return ", ".join(parts)


def error_message(response: requests.Response) -> str:
    """The message of an error response, from any server."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason}"


def wait_for(url: str, patience_s: float) -> None:
    """Waits until `/ping` answers 200, and meanwhile prints that the model is loading.

    Raises ServerError if nothing answers within `patience_s` seconds, or the server will not become ready.
    """
    started = time.monotonic()
    shown = False
    try:
        while True:
            waited = time.monotonic() - started
            try:
                response = requests.get(f"{url}/ping", timeout=CONNECT_S)
            except requests.RequestException as error:
                if waited > patience_s:
                    raise ServerError(f"no server at {url}; start one with `make serve`") from error
                status = "no server yet"
            else:
                if response.ok:
                    return
                status = reported_status(response)
                if status != "loading":
                    raise ServerError(f"the server at {url} is not ready: {status}")
            line = f"waiting for {url}: {status}, {waited:.0f} s"
            if sys.stderr.isatty():
                print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            elif not shown:
                print(line, file=sys.stderr, flush=True)
            shown = True
            time.sleep(PING_S)
    finally:
        if shown and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def reported_status(response: requests.Response) -> str:
    try:
        return str(response.json()["status"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason}"


def show(conversation: Conversation, question: Content, *, terminal: bool) -> bool:
    """Prints one reply as it arrives. Ctrl-C ends the reply, not the program. Returns whether the reply was
    complete.

    Reasoning and figures are printed only to a `terminal`; other outputs get only the answer.
    """
    shown = ""
    complete = False
    reply = conversation.ask(question)
    try:
        with contextlib.closing(reply):
            for kind, text in reply:
                if kind == "reasoning" and not terminal:
                    continue
                if kind != shown:
                    change = {"reasoning": DIM, "content": RESET}[kind] if terminal else ""
                    print("\n\n" * bool(shown) + change, end="")
                    shown = kind
                    text = text.lstrip("\n")
                print(text.translate(CONTROLS), end="", flush=True)
        complete = True
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except ServerError as error:
        print(f"{RESET if terminal else ''}error: {error}", file=sys.stderr)
    if terminal and conversation.figures and complete:
        print(f"{RESET}\n{DIM}{conversation.figures}", end="")
    print(RESET if terminal else "")
    return complete


def questions(prompt: str) -> Iterator[str]:
    """The messages that the user types, until the input ends. Ctrl-C discards an unfinished message.

    A message between \"\"\" and \"\"\" may have several lines; a line that ends with \\ continues on the
    next.
    """
    while True:
        try:
            text = input(prompt)
            if text.startswith('"""'):
                text = text[3:]
                while not text.rstrip().endswith('"""'):
                    text += "\n" + input(". ")
                text = text.rstrip()[:-3].strip("\n")
            else:
                while text.endswith("\\"):
                    text = text[:-1] + "\n" + input(". ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if text.strip():
            yield text


def obey(conversation: Conversation, line: str) -> bool:
    """Runs a command line; returns whether the conversation continues."""
    name, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    match name:
        case "/help":
            print(HELP)
        case "/exit" | "/quit" | "/bye":
            return False
        case "/new":
            conversation.messages = []
        case "/think" if rest in ("", "on", "off"):
            conversation.think = not conversation.think if not rest else rest == "on"
            print(f"thinking is {'on' if conversation.think else 'off'}")
        case "/think":
            print(f"/think {rest}: on or off", file=sys.stderr)
        case "/system":
            conversation.system = rest or None
        case "/save" if rest:
            try:
                conversation.save(Path(rest).expanduser())
                print(f"saved to {rest}")
            except OSError as error:
                print(f"{rest}: {error.strerror or error}", file=sys.stderr)
        case "/save":
            print("/save FILE: the name is missing", file=sys.stderr)
        case _:
            near = difflib.get_close_matches(name, COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else "/help lists them"
            print(f"{name} is not a command; {hint}", file=sys.stderr)
    return True


@contextlib.contextmanager
def line_editing() -> Iterator[None]:
    """Arrow keys and a persistent history, if Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    history = Path(state) / "qwen-serve" / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(HISTORY_LINES)
    names = list(COMMANDS)
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, n: ([x for x in names if x.startswith(text)] + [None])[n])
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)


def converse(conversation: Conversation) -> None:
    """Asks and answers until the input ends."""
    print(f"{conversation.model()} at {conversation.url}; /help lists commands")
    with line_editing():
        for line in questions("> "):
            if not line.startswith("/"):
                try:
                    show(conversation, with_files(line), terminal=sys.stdout.isatty())
                except (ServerError, AttachmentError) as error:
                    print(f"error: {error}", file=sys.stderr)
            elif not obey(conversation, line):
                break


def main(argv: Sequence[str] | None = None, prog: str = "python -m qwen_serve.server.client") -> int:
    """Runs the conversation, or answers one question. Returns the exit status: 1 without a server or an
    answer."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Talk to a running server in the terminal, or print the answer to one question.\nThe "
        "question is in the arguments, on standard input, or in both, in this order.",
        epilog=f"In the conversation:\n{HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("question", nargs="*", help="ask this, print the answer and exit")
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8080",
        help="the server's address; localhost:8080 and .../v1 will do, too [%(default)s]",
    )
    parser.add_argument(
        "--think", action=argparse.BooleanOptionalAction, default=True, help="ask for thinking [on]"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens in a reply [what fits]")
    parser.add_argument(
        "--wait", type=float, default=10, metavar="S", help="seconds to wait for a server to appear [10]"
    )
    options = parser.parse_args(argv)
    try:
        url = address(options.url)
        conversation = Conversation(url, options.think, options.system, options.max_tokens)
        question = with_files(" ".join(options.question))
        if not sys.stdin.isatty():  # piped input has no file references
            piped = sys.stdin.read().strip()
            if isinstance(question, str):
                question = "\n\n".join(filter(None, (question, piped)))
            elif piped:
                question.append({"type": "text", "text": f"\n\n{piped}"})
        wait_for(conversation.url, options.wait)
        if question:
            return 0 if show(conversation, question, terminal=sys.stdout.isatty()) else 1
        if not sys.stdin.isatty():
            raise ServerError("standard input is empty: there is nothing to ask")
        converse(conversation)
    except (ServerError, AttachmentError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
