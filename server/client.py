"""`python -m server.client`: a conversation in the terminal, thinking shown dimmed as it streams."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import requests

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

DIM, RESET = "\x1b[2m", "\x1b[0m"
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""What no reply may send to a terminal: escape sequences move the cursor and worse."""

PING_S = 0.5
CONNECT_S = 5

HELP = "/think, /no-think, /new (start again), Ctrl-C (stop the reply), Ctrl-D (leave)"


class ServerError(Exception):
    """The server refused or broke off a reply; the message is its own."""


@dataclass
class Conversation:
    """The messages so far, and the server that continues them."""

    url: str
    think: bool
    system: str | None = None
    max_tokens: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = requests.Session()
        if key := os.environ.get("QWEN_API_KEY"):
            self.session.headers["Authorization"] = f"Bearer {key}"
        self.forget()

    def forget(self) -> None:
        """Starts again, with the system message alone."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Generator[tuple[str, str], None, None]:
        """Sends a user's message; yields ("reasoning" | "content", text) as the reply comes.

        What came of the answer joins the conversation, however the reply ends; a question without an answer
        leaves it as it was. Raises ServerError.
        """
        question = {"role": "user", "content": text}
        body = {
            "messages": [*self.messages, question],
            "stream": True,
            "chat_template_kwargs": {"enable_thinking": self.think},
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        answer = ""
        try:
            for delta in self._stream(body):
                if reasoning := delta.get("reasoning_content"):
                    yield "reasoning", reasoning
                if content := delta.get("content"):
                    answer += content
                    yield "content", content
        finally:
            if answer:
                self.messages += [question, {"role": "assistant", "content": answer}]

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The deltas of one streamed reply."""
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
                    for choice in event["choices"]:
                        yield choice["delta"]
        except requests.RequestException as error:
            raise ServerError(f"the connection to {self.url} broke: {error}") from error


def error_message(response: requests.Response) -> str:
    """What an error response says, whoever wrote it."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason}"


def wait_for(url: str, patience_s: float) -> None:
    """Returns once `/ping` answers 200. Says meanwhile that the model is loading.

    Raises ServerError when nothing answers within `patience_s` seconds, or what answers will not get ready.
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
                if status not in ("loading", "ready"):
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


def show(conversation: Conversation, question: str, *, colour: bool) -> None:
    """Prints one reply as it comes; Ctrl-C ends the reply, not the program."""
    shown = ""
    reply = conversation.ask(question)
    try:
        with contextlib.closing(reply):
            for kind, text in reply:
                if kind != shown:
                    change = {"reasoning": DIM, "content": RESET}[kind] if colour else ""
                    print("\n\n" * bool(shown) + change, end="")
                    shown = kind
                    text = text.lstrip("\n")
                print(text.translate(CONTROLS), end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except ServerError as error:
        print(f"{RESET if colour else ''}error: {error}", file=sys.stderr)
    print(RESET if colour else "")


def questions(prompt: str) -> Iterator[str]:
    """Lines typed or piped in, until the input ends. Ctrl-C discards the line being typed."""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line.strip():
            yield line


def main() -> None:
    """Runs the conversation. Exits with 1 when there is no server to talk to."""
    parser = argparse.ArgumentParser(prog="python -m server.client", description=__doc__, epilog=HELP)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server [%(default)s]")
    parser.add_argument(
        "--think", action=argparse.BooleanOptionalAction, default=True, help="ask for thinking [on]"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens in a reply [what fits]")
    parser.add_argument(
        "--wait", type=float, default=10, metavar="S", help="seconds to wait for a server to appear [10]"
    )
    options = parser.parse_args()
    url = options.url.rstrip("/")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history for input()

    try:
        wait_for(url, options.wait)
    except ServerError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    conversation = Conversation(url, options.think, options.system, options.max_tokens)
    interactive = sys.stdin.isatty()
    if interactive:
        print(HELP)
    for line in questions("> " if interactive else ""):
        match line.strip():
            case "/think" | "/no-think" as word:
                conversation.think = word == "/think"
            case "/new":
                conversation.forget()
            case _:
                show(conversation, line, colour=sys.stdout.isatty())


if __name__ == "__main__":
    main()
