"""Several servers under one workload in turns, so that whatever drifts on the machine hits them all alike.

With all servers resident each cell of a round visits every server before the next begins; one at a time, each
server does all cells of a round. What a server fails at ends its part, with the reason on record; the others
go on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from bench import provenance
from bench.errors import BenchError
from bench.load.cell import Cell, Supply, Target, measure_counted
from bench.load.client import Client
from bench.servers.commands import Setup, command_for, resources
from bench.servers.launch import ServerProcess, start_all
from bench.servers.peer import Peer
from bench.store import Run
from bench.terminal import Bar

Answers = dict[tuple[str, str], list[str | None]]
"""By workload and cell, of one round."""


@dataclass
class Contender:
    """A peer while it is compared. ``failed``: why it is out; ``answers``: of the round that runs."""

    peer: Peer
    process: ServerProcess
    target: Target
    failed: str | None = None
    answers: Answers = field(default_factory=dict)

    @classmethod
    def of(cls, peer: Peer, setup: Setup, run: Run, *, timeout: float, api_key: str | None) -> Self:
        """Not started yet; its command line and resources are on record."""
        process = command_for(peer, setup)
        command = [Path(word).name if at == 0 else word for at, word in enumerate(process.command)]
        log = {"log": str(process.log)} if process.log is not None else {}
        run.describe(
            peer.name,
            program=peer.program,
            command=command,
            url=process.url,
            **log,
            **resources(peer, setup),
        )
        return cls(peer, process, Target(peer.name, Client(process.url, timeout=timeout, api_key=api_key)))

    @property
    def alive(self) -> bool:
        """Whether it is still compared."""
        return self.failed is None

    def fail(self, run: Run, reason: str) -> None:
        """It is out. Says so at once."""
        self.failed = reason
        run.describe(self.peer.name, failed=reason)
        run.note(f"{self.peer.name} FAILED: {reason}")

    async def started(self, run: Run) -> None:
        """Take down what the running server says of itself."""
        named = self.peer.program in ("url", "vllm")  # these want their model named
        listed = await self.target.client.model() if named else None
        self.target = Target(self.peer.name, self.target.client, listed)
        about = await provenance.about_server(self.target.client)
        seconds = {"start_seconds": self.process.start_seconds} if self.process.command else {}
        run.describe(self.peer.name, **about, **seconds)


@dataclass
class Turns:
    """The comparison. ``make_cells`` is asked once, when the first server is up: it may have to count
    tokens for prompts."""

    run: Run
    contenders: Sequence[Contender]
    reference: str
    rounds: int
    resident: bool
    make_cells: Callable[[Target], Awaitable[tuple[Supply, Sequence[Cell]]]]
    _cells: Sequence[Cell] | None = None
    _supply: Supply | None = None

    async def hold(self) -> None:
        """Start, measure, stop. All servers are stopped when this returns, however it does."""
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
        await self._start(self.contenders)
        first = next((one for one in self.contenders if one.alive), None)
        if first is None:
            return
        cells = await self._prepared(first.target)
        with self._bar(cells) as bar:
            for round in range(1, self.rounds + 1):
                for turn, cell in enumerate(cells):
                    for contender in _from(self.contenders, round + turn):
                        await self._visit(contender, cell, round, bar, again=round > 1)
                self._compare(round)

    async def _one_after_another(self) -> None:
        bar: Bar | None = None
        for round in range(1, self.rounds + 1):
            for contender in _from(self.contenders, round):
                await self._start([contender])
                if contender.alive:
                    cells = await self._prepared(contender.target)
                    with self._bar(cells, rounds=1, peers=1) as bar:
                        for cell in cells:
                            await self._visit(contender, cell, round, bar, again=False)
                await contender.process.stop()
            self._compare(round)

    async def _prepared(self, target: Target) -> Sequence[Cell]:
        if self._cells is None:
            self._supply, self._cells = await self.make_cells(target)
            for cell in self._cells:
                await cell.prepare(self.rounds)
        assert self._supply is not None
        for one in self.contenders:
            if "counted_by" not in self.run.manifest.subjects[one.peer.name]:
                self.run.describe(one.peer.name, counted_by=self._supply.counted_by)
        return self._cells

    def _bar(self, cells: Sequence[Cell], *, rounds: int | None = None, peers: int | None = None) -> Bar:
        each = sum(cell.requests() for cell in cells)
        total = each * (rounds or self.rounds) * (peers or sum(one.alive for one in self.contenders))
        return Bar("peers in turns", total=total)

    async def _start(self, contenders: Sequence[Contender]) -> None:
        alive = [contender for contender in contenders if contender.alive]
        outcomes = await start_all([contender.process for contender in alive])
        for contender, failure in zip(alive, outcomes, strict=True):
            if failure is not None:
                contender.fail(self.run, str(failure))
                continue
            try:
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
        bar.advance(0, note=f"{contender.peer.name}, {where}: {found.said}")

    def _compare(self, round: int) -> None:
        """Record how many of a round's answers equal the reference's, of those that both gave."""
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
    """All of them, another one first each time."""
    at = shift % len(contenders)
    return [*contenders[at:], *contenders[:at]]
