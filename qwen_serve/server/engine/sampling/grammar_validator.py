"""Compiles every grammar in a separate process first, which `GrammarValidator` starts and feeds.

llguidance follows references by recursion, so a chain of a thousand definitions overflows the stack and ends
the process. It limits most of its work, but some schemas (a few hundred `patternProperties`) keep it busy for
minutes, and it cannot be interrupted. This process has a smaller stack than the compiler's thread and little
time, so what compiles here compiles there, too.

Run as a script: only the standard library and llguidance are imported.
"""

import contextlib
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

CPU_SECONDS = 2.0
STACK = 4 * 2**20
MEMORY = 2 * 2**30

LEXER_STATES = 50_000
"""Maximum for one grammar; each takes up to 2 KB: 100 MB."""


class GrammarValidator:
    """Checks whether a grammar can be compiled. For one thread; the process starts with the first grammar."""

    def __init__(self, special: Sequence[str]) -> None:
        """`special`: the tokens that a grammar may name."""
        self._special = special
        self._process: subprocess.Popen[bytes] | None = None

    def compiles(self, text: str, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Whether compiling `text` ends, with a grammar or with an error.

        Takes at most CPU_SECONDS. A process that dies for another reason is replaced once, since the grammar
        may not be the cause, if the answer is still `wanted`.
        """
        if self._answers(text):
            return True
        if self.close() == -signal.SIGPROF or not wanted():
            return False
        if self._answers(text):
            return True
        self.close()
        return False

    def _answers(self, text: str) -> bool:
        process = self._process or self._start()
        assert process.stdin and process.stdout
        try:
            _send(process.stdin, text.encode())
            return process.stdout.read(1) == b"."
        except OSError:
            return False

    def interrupt(self) -> None:
        """Kill the process, even while it compiles. From any thread."""
        if (process := self._process) is not None:
            process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: imports must not find this folder's modules in place of the library's
        command = [sys.executable, "-P", str(Path(__file__)), str(CPU_SECONDS)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert process.stdin
        _send(process.stdin, "\n".join(self._special).encode())
        self._process = process
        return process

    def close(self) -> int:
        """End the process and return its exit status. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        process.communicate()
        return process.returncode


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "big") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    """Raises EOFError if the pipe was closed."""
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    return pipe.read(int.from_bytes(head, "big"))


def main() -> None:
    """Read special tokens, then grammars; write a point for each that compiles within argv[1] seconds."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    seconds, special = float(sys.argv[1]), _receive(sys.stdin.buffer).split(b"\n")

    class Bytes:
        """A tokenizer of bytes: whether a grammar compiles does not depend on the vocabulary."""

        def __init__(self) -> None:
            self.tokens = [*(bytes([byte]) for byte in range(256)), *(b"\xff" + token for token in special)]
            self.special_token_ids = list(range(256, len(self.tokens)))
            self.eos_token_id, self.bos_token_id = 0, None

        def __call__(self, text: str) -> list[int]:
            return list(text.encode())

    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
    limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)

    def compile_(text: str) -> None:
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()

    def follow() -> None:
        try:
            while True:
                text = _receive(sys.stdin.buffer).decode()
                signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process
                with contextlib.suppress(BaseException):  # a panic; the compiler's thread meets it again
                    compile_(text)
                signal.setitimer(signal.ITIMER_PROF, 0)
                sys.stdout.buffer.write(b".")
                sys.stdout.buffer.flush()
        except EOFError:
            return

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    thread = threading.Thread(target=follow)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
