"""Measures several servers in turns under one workload, so that drift of the machine affects all equally.

If all servers are resident, each does a cell of a round before the next cell begins. Otherwise one server
after the other does all cells of a round. A server that fails drops out, and the reason is recorded; the
others continue.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Self

from qwen_serve.bench import provenance
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.cell import Cell, PromptSource, measure_counted
from qwen_serve.bench.load.client import Client
from qwen_serve.bench.load.generator import Target
from qwen_serve.bench.servers.launch import ServerProcess
from qwen_serve.bench.servers.programs import Peer, Setup, process_of, resources
from qwen_serve.bench.store import Run
from qwen_serve.bench.terminal import Bar

Answers = dict[tuple[str, str], list[str | None]]
"""The answers of one round, by workload and cell."""


@dataclass
class Contender:
    """A peer during the comparison. ``failed``: why it dropped out; ``answers``: those of the current
    round."""

    peer: Peer
    process: ServerProcess
    target: Target
    failed: str | None = None
    answers: Answers = field(default_factory=dict)

    @classmethod
    def of(cls, peer: Peer, setup: Setup, run: Run, *, timeout: float, api_key: str | None) -> Self:
        """A contender that is not started yet. Its command line and resources are recorded."""
        process = process_of(peer, setup)
        command = [Path(word).name if at == 0 else word for at, word in enumerate(process.command)]
        log = {"log": str(process.log)} if process.log is not None else {}
        run.describe(
            peer.name,
            program=peer.program,
            command=command,
            url=process.url,
            **log,
            **({"fields": dict(peer.fields)} if peer.fields else {}),
            **({"beside": dict(peer.beside)} if peer.beside is not None else {}),
            **resources(peer, setup),
        )
        client = Client(process.url, timeout=timeout, api_key=api_key)
        return cls(peer, process, Target(peer.name, client, fields=peer.fields, beside=peer.beside))

    @property
    def alive(self) -> bool:
        """Whether it has not dropped out."""
        return self.failed is None

    def fail(self, run: Run, reason: str) -> None:
        """Drop this contender: record the reason and print it."""
        self.failed = reason
        run.describe(self.peer.name, failed=reason)
        run.note(f"{self.peer.name} FAILED: {reason}")

    async def started(self, run: Run) -> None:
        """Record the running server's description of itself."""
        named = self.peer.program in ("url", "vllm")  # these require the model's name
        listed = await self.target.client.model() if named else None
        self.target = replace(self.target, model=listed)
        about = await provenance.about_server(self.target.client)
        seconds = {"start_seconds": self.process.start_seconds} if self.process.command else {}
        run.describe(self.peer.name, **about, **seconds)


@dataclass
class Turns:
    """The comparison. ``make_cells`` is called once, when the first server is ready, since making prompts may
    need its tokenizer."""

    run: Run
    contenders: Sequence[Contender]
    reference: str
    rounds: int
    resident: bool
    make_cells: Callable[[Target], Awaitable[tuple[PromptSource, Sequence[Cell]]]]
    limit: float | None = None
    """Seconds after which no further round begins."""
    _cells: Sequence[Cell] = ()
    _began: float = field(default_factory=monotonic)

    async def hold(self) -> None:
        """Start, measure and stop the servers. They are stopped even if an exception is raised."""
        try:
            for contender in self.contenders:
                await contender.target.client.__aenter__()
            if self.resident:
                await self._all_at_once()
            else:
                await self._one_after_another()
        finally:
            await asyncio.shield(asyncio.gather(*(one.process.stop() for one in self.contenders)))
            for contender in self.contenders:
                await contender.target.client.__aexit__(None, None, None)

    async def _all_at_once(self) -> None:
        # one after the other: a server may measure the machine at its start, which must be idle then
        for contender in self.contenders:
            await self._start(contender)
        first = next((one for one in self.contenders if one.alive), None)
        if first is None:
            return
        await self._prepare(first.target)
        alive = sum(one.alive for one in self.contenders)
        with self._bar(self.rounds * alive) as bar:
            for round in self._rounds():
                for turn, cell in enumerate(self._cells):
                    for contender in _from(self.contenders, round + turn):
                        await self._visit(contender, cell, round, bar, again=round > 1)
                self._compare(round)

    async def _one_after_another(self) -> None:
        for round in self._rounds():
            for contender in _from(self.contenders, round):
                await self._start(contender)
                if contender.alive:
                    await self._prepare(contender.target)
                    with self._bar(1) as bar:
                        for cell in self._cells:
                            await self._visit(contender, cell, round, bar, again=False)
                await contender.process.stop()
            self._compare(round)

    def _rounds(self) -> Iterator[int]:
        for round in range(1, self.rounds + 1):
            if round > 1 and self.limit is not None and monotonic() - self._began > self.limit:
                self.run.note(f"{round - 1} of {self.rounds} rounds began within {self.limit:g} s")
                return
            yield round

    async def _prepare(self, target: Target) -> None:
        if self._cells:
            return
        source, self._cells = await self.make_cells(target)
        for cell in self._cells:
            await cell.prepare()
        for one in self.contenders:
            self.run.describe(one.peer.name, counted_by=source.counted_by)

    def _bar(self, turns: int) -> Bar:
        return Bar("peers in turns", total=turns * sum(cell.requests for cell in self._cells))

    async def _start(self, contender: Contender) -> None:
        if not contender.alive:
            return
        try:
            await contender.process.start()
            await contender.started(self.run)
        except BenchError as error:
            contender.fail(self.run, str(error))

    async def _visit(self, contender: Contender, cell: Cell, round: int, bar: Bar, *, again: bool) -> None:
        if not contender.alive:
            return
        where = f"{cell.workload}, {cell.name}"
        try:
            await cell.warm_up(contender.target, again=again)
            found = await measure_counted(self.run, contender.target, cell, round, bar)
            if found.all_failed:
                raise BenchError(f"every request failed, the first: {found.errors[0]}")
        except BenchError as error:
            log = "" if contender.process.running else f"; its log ends:\n{contender.process.tail()}"
            contender.fail(self.run, f"{where}, round {round}: {error}{log}")
            return
        contender.answers[cell.workload, cell.name] = found.answers
        bar.advance(0, note=f"{contender.peer.name}, {where}")

    def _compare(self, round: int) -> None:
        """Record how many of a round's answers equal the reference's. Only answers that both servers gave
        count."""
        base = next(one.answers for one in self.contenders if one.peer.name == self.reference)
        for contender in self.contenders:
            for key, answers in contender.answers.items():
                pairs = [
                    (ours, theirs)
                    for ours, theirs in zip(answers, base.get(key, ()), strict=False)
                    if ours is not None and theirs is not None
                ]
                if pairs:
                    same = sum(ours == theirs for ours, theirs in pairs)
                    values = {"same_answers": float(same), "compared_answers": float(len(pairs))}
                    self.run.add(contender.peer.name, *key, round, values)
        for contender in self.contenders:
            contender.answers = {}


def _from(contenders: Sequence[Contender], shift: int) -> list[Contender]:
    """The contenders in rotated order, beginning with number ``shift``."""
    at = shift % len(contenders)
    return [*contenders[at:], *contenders[:at]]
