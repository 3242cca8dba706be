"""`make hops`: counts the functions of ours that one streamed chat request enters, with nano on the CPU.

Hops are our functions on the stacks at the ends of each way. In: `Engine.prompt`, `Engine.submit` and, on the
engine's thread, `Scheduler.add`. Out: on the engine's thread a token's `OutputQueue.put`, and on the event
loop `Generation.receive`, `Generation.__anext__` and the HTTP server's `send`. A function on several of the
stacks counts once. A coroutine that goes on counts as a call. Comprehensions are not counted.
"""

import argparse
import threading
from collections import Counter
from itertools import chain
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

import httpx
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

import qwen_serve
from qwen_serve.server.engine.engine import Engine
from qwen_serve.server.engine.outputs import Generation, OutputQueue
from qwen_serve.server.engine.scheduler import Scheduler
from qwen_serve.server.engine.steps import StepLoop
from tests.server.serving import Served, serving
from tests.waiting import wait_until

OURS = str(Path(qwen_serve.__file__).parent)
WAYS: dict[str, tuple[Any, ...]] = {
    "in": (Engine.prompt, Engine.submit, Scheduler.add),
    "out": (OutputQueue.put, Generation.receive, Generation.__anext__, RequestResponseCycle.send),
}
ENDS: set[CodeType] = {end.__code__ for ends in WAYS.values() for end in ends}
STEP = StepLoop.step.__code__
SHORT, LONG = 16, 144
"""Tokens of two answers, whose difference is what further tokens cost."""
ROUNDS = 3
"""Of each answer. The fewest calls count, since others include what happens now and then."""


class Counted:
    """What all threads call while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[CodeType] = Counter()
        self.stacks: dict[CodeType, Counter[tuple[CodeType, ...]]] = {end: Counter() for end in ENDS}
        """For each end how often which of our functions were on its stack, the outermost first."""
        self.steps: list[set[CodeType]] = []
        """The functions that each step entered on the engine's thread."""
        self._lock = threading.Lock()
        self._engine = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.on or event != "call" or not (code in ENDS or is_ours(code)):
            return
        with self._lock:
            if code in ENDS:
                self.stacks[code][stack(frame)] += 1
            if code is STEP:
                self._engine = threading.get_ident()
                self.steps.append(set())
            if is_ours(code):
                self.calls[code] += 1
                if self.steps and threading.get_ident() == self._engine:
                    self.steps[-1].add(code)

    def requests(self, server: Served, tokens: int) -> int:
        """Counts requests of so many tokens. Returns the number of calls that one of them needs."""
        totals = []
        for number in range(ROUNDS):
            self.calls.clear()
            self.steps.clear()
            self.on = True
            ask(server.url, f"What is {tokens} and {number}?", tokens)
            wait_until(lambda: server.service.in_flight == 0)
            self.on = False
            totals.append(self.calls.total())
        return min(totals)

    def usual(self, end: Any) -> tuple[CodeType, ...]:
        """The stack that most calls of `end` had."""
        stacks = self.stacks[end.__code__]
        assert stacks, f"{end.__qualname__} was not called: WAYS has to say where the way ends now"
        return stacks.most_common(1)[0][0]


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(OURS) and (code.co_name[0] != "<" or code.co_name == "<lambda>")


def stack(frame: FrameType | None) -> tuple[CodeType, ...]:
    """Our functions on the stack, the outermost first."""
    found = []
    while frame is not None:
        if is_ours(frame.f_code):
            found.append(frame.f_code)
        frame = frame.f_back
    return tuple(reversed(found))


def where(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(OURS)}:{code.co_firstlineno} {code.co_qualname}"


def ask(url: str, prompt: str, tokens: int) -> None:
    """A streamed chat request of so many tokens."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as answer:
        assert '"finish_reason":"length"' in answer.read().decode(), answer.text


def main() -> None:
    parser = argparse.ArgumentParser(prog="make hops", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--list", action="store_true", help="name the functions of each way")
    arguments = parser.parse_args()
    counted = Counted()
    threading.setprofile(counted)
    with serving(arguments.model, speculation="off") as server:
        ask(server.url, "What comes first?", SHORT)  # what only a server's first request does is left out
        few = counted.requests(server, SHORT)
        calls = counted.requests(server, LONG) - few
    functions = counted.calls.keys()
    ways = {way: list(dict.fromkeys(chain(*map(counted.usual, ends)))) for way, ends in WAYS.items()}
    print(f"functions             {len(functions)} in {len({code.co_filename for code in functions})} files")
    for way, hops in ways.items():
        print(f"{f'hops {way}':21} {len(hops)}")
    print(f"calls a token         {calls / (LONG - SHORT):.0f}")
    print(f"functions a step      {median(map(len, counted.steps)):.0f}")
    if arguments.list:
        for way, hops in ways.items():
            print(f"\n{way}:", *map(where, hops), sep="\n  ")


if __name__ == "__main__":
    main()
