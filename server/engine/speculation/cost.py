"""What drafts cost on this machine: `python -m server.engine.speculation.cost GGUF`.

Milliseconds of a step of one sequence that decodes, and that verifies 2, 3, 5... rows, by snapshots of its
state (`rollback.py`); the same where each draft is wrong, by all ways back; the first steps of a shape, for
which llama.cpp builds a graph, and CUDA captures it; to copy the state and to put it back; and to settle on a
snapshot. Then drafts of the MTP head, if there is one: of one row after another, and with a call of several
rows, which catches up, before each.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from server.engine.llama import Context, ContextOptions, Model, Readout, supports_gpu
from server.engine.llama.mtp import MtpContext
from server.engine.measuring import cost_parser, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROWS = (2, 3, 5, 9)
"""A draft of one token, of two, four, eight, and the token before it."""

CELLS, TEXT = 8192, 2048
"""Of the cache; and tokens after which a sequence begins anew."""

SLOT, HOLDER = 0, 1

STEADY = 4
"""Runs of a shape after which it has its graph, and the graph is captured."""


def options(n_snapshots: int) -> ContextOptions:
    """A context for one sequence that drafts."""
    return ContextOptions(
        n_ctx=CELLS,
        n_seq=4,
        n_batch=512,
        n_ubatch=512,
        n_outputs=64,
        n_outputs_per_seq=64,
        threads=1,
        threads_batch=1,
        flash_attn="auto",
        type_k="f16",
        type_v="f16",
        n_readouts=4,
        n_snapshots=n_snapshots,
    )


class Text:
    """One sequence that grows step by step."""

    def __init__(self, context: Context) -> None:
        self.context, self.length = context, 0

    def step(self, n: int, outputs: int | None = None) -> None:
        """`n` tokens more, and what is read out of the last `outputs` of them."""
        context = self.context
        if self.length + n > TEXT:
            self.begin_anew()
        context.tokens[:n] = 5
        context.positions[:n] = range(self.length, self.length + n)
        context.sequences[:n] = SLOT
        first = 0 if outputs is None else n - outputs
        context.outputs[:first], context.outputs[first:n] = 0, 1
        context.decode(n)
        context.rows([SLOT] * (n - first), range(first, n)).all_best()  # waits for it
        self.length += n

    def begin_anew(self) -> None:
        """Forget it all."""
        self.context.clear()
        self.length = 0

    def reject(self, n: int) -> None:
        """Go back to a snapshot, `n` tokens ago."""
        self.context.remove(SLOT, self.length - n)
        self.length -= n

    def hold(self) -> None:
        """Make the state one to come back to."""
        self.context.copy(SLOT, HOLDER)

    def come_back(self, n: int) -> None:
        """Go back to that state, `n` tokens ago."""
        self.length -= n
        self.context.copy(HOLDER, SLOT, self.length, self.length)
        self.context.remove(SLOT, self.length)

    def put_back(self, n: int) -> None:
        """Go back to the state that was copied, `n` tokens ago."""
        self.length -= n
        self.context.unstash(SLOT)
        self.context.remove(SLOT, self.length)


def once(step: Callable[[], object]) -> float:
    """Milliseconds that it takes."""
    started = perf_counter()
    step()
    return 1000 * (perf_counter() - started)


def milliseconds(step: Callable[[], object], times: int) -> float:
    """The median of some runs, after those that build graphs and have them captured."""
    return round(median([once(step) for _ in range(STEADY + times)][STEADY:]), 3)


def trunk(model: Model, n_snapshots: int, times: int) -> dict[str, Any]:
    """Steps, with so many snapshots of every state."""
    context = Context(model, options(n_snapshots))
    text = Text(context)

    def go_back(rows: int) -> None:
        text.step(rows)
        text.reject(rows - 1)

    def come_back(rows: int) -> None:
        text.hold()
        text.step(rows)
        text.come_back(rows)

    def put_back(rows: int) -> None:
        context.stash(SLOT)
        text.step(rows)
        text.put_back(rows)

    def first_steps(rows: int) -> list[float]:
        for _ in range(STEADY):
            text.step(1)
        return [once(lambda: text.step(rows)) for _ in range(STEADY)]

    def settle() -> None:
        context.copy(SLOT, HOLDER)

    found: dict[str, Any] = {
        "decode": milliseconds(lambda: text.step(1), times),
        "verify": {rows: milliseconds(lambda rows=rows: text.step(rows), times) for rows in ROWS},  # type: ignore[misc]
        "first_steps": [
            round(median(spent), 3) for spent in zip(*(first_steps(2) for _ in range(times)), strict=True)
        ],
        "prompt_512": milliseconds(lambda: text.step(512, outputs=1), min(times, 5)),
        "wrong_by_holder": {rows: milliseconds(lambda rows=rows: come_back(rows), times) for rows in ROWS},  # type: ignore[misc]
    }
    text.begin_anew()
    text.step(512, outputs=1)
    found["copy"] = milliseconds(lambda: context.stash(SLOT), times)
    found["put_back"] = milliseconds(lambda: context.unstash(SLOT), times)
    found["wrong_by_copy"] = {rows: milliseconds(lambda rows=rows: put_back(rows), times) for rows in ROWS}  # type: ignore[misc]
    reach = [rows for rows in ROWS if rows - 1 <= n_snapshots]
    if reach:
        found["wrong_by_snapshot"] = {
            rows: milliseconds(lambda rows=rows: go_back(rows), times)  # type: ignore[misc]
            for rows in reach
        }
        go_back(2)
        settle()
        go_back(2)
        found["settle"] = round(once(settle), 3)
    context.close()
    return found


def head(model: Model, times: int) -> dict[str, Any]:
    """Drafts of the multi-token-prediction head."""
    context = MtpContext(model, replace(options(0), readout=Readout.GUESS, n_outputs_per_seq=1))
    text = Text(context)

    def draft(n: int) -> None:
        text.step(n, outputs=1)

    def in_turns() -> None:
        draft(5)
        draft(1)

    found = {
        "draft": milliseconds(lambda: draft(1), times),
        "catch_up": {rows: milliseconds(lambda rows=rows: draft(rows), times) for rows in ROWS},  # type: ignore[misc]
        "catch_up_5_and_draft": milliseconds(in_turns, times),
    }
    context.close()
    return found


def main(arguments: Sequence[str]) -> None:
    """Measure, print, and write JSON where `--out` says."""
    parser = cost_parser("python -m server.engine.speculation.cost", __doc__, times=30)
    parser.add_argument("--snapshots", default="0,2,4,8", metavar="N,...", help="of every state")
    flags = parser.parse_args(arguments)

    def measure(model: Model) -> dict[str, Any]:
        found: dict[str, Any] = {
            "by_snapshots": {n: trunk(model, n, flags.times) for n in map(int, flags.snapshots.split(","))}
        }
        if model.n_mtp:
            whole = Model(flags.model, n_gpu_layers=-1 if supports_gpu() else 0, load_mtp=True)
            found["head"] = head(whole, flags.times)
            whole.close()
        return found

    publish(flags, measure)


if __name__ == "__main__":
    main(sys.argv[1:])
