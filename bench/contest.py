"""Several servers under one workload in turns, so that whatever drifts on the machine hits them all alike.

A workload is a list of cells: the runs of one category and protocol, or one level of concurrency. With all
servers resident each cell visits every peer before the next begins; one at a time, each peer does all cells
of a round. What a peer fails at ends its part, with the reason on record; the others go on.
"""

import argparse
import asyncio
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench import environment, latency, throughput
from bench.counters import Counters, add, growth, read_counters
from bench.errors import BenchError
from bench.latency_result import FILLER, FILLER_TOKENS, PROTOCOLS, Baseline, Category, Protocol, summarize
from bench.launch import Peer, ServerProcess, start_all
from bench.load.client import Client
from bench.load.vocabulary import Vocabulary, find_vocabulary
from bench.peers_result import Measured, PeerRecord, at_once, requests_at
from bench.prompts import Prompts, TextPrompts, find_prompts
from bench.throughput_result import summarize_level
from bench.workloads import Workload


@dataclass
class Contender:
    """A peer in the contest: its process, and what was measured of it. ``texts``: answers by cell."""

    peer: Peer
    process: ServerProcess
    client: Client
    record: PeerRecord
    measured: Measured
    model: str | None = None
    texts: dict[str, list[str]] = field(default_factory=dict)
    workload: Workload | None = None

    @classmethod
    def of(cls, peer: Peer, process: ServerProcess, *, timeout: float, api_key: str | None) -> "Contender":
        """Not started yet."""
        record = PeerRecord(
            name=peer.name,
            program=peer.program,
            command=[Path(word).name if i == 0 else word for i, word in enumerate(process.command)],
            url=process.url,
            log=str(process.log) if process.log else None,
        )
        client = Client(process.url, timeout=timeout, api_key=api_key)
        return cls(peer, process, client, record, Measured(peer=peer.name))

    @property
    def alive(self) -> bool:
        """Whether it is still in the contest."""
        return self.record.failed is None

    def fail(self, reason: str) -> None:
        """Out of the contest. Says so at once."""
        self.record = self.record.model_copy(update={"failed": reason})
        print(f"{self.peer.name}: OUT: {reason}", file=sys.stderr, flush=True)

    def count(self, cell: str, grown: Counters) -> None:
        """Take down what the server's own counters say of a cell."""
        counters = self.measured.counters
        update = {**counters, cell: add(counters.get(cell, {}), grown)}
        self.measured = self.measured.model_copy(update={"counters": update})

    async def started(self) -> None:
        """Take down what the running server says of itself."""
        listed = await self.client.model()
        self.model = listed if self.peer.program == "url" else None  # vLLM and SGLang want it named
        seconds = self.process.start_seconds if self.process.command else None
        about = {**await environment.server(self.client), **({"model": listed} if listed else {})}
        self.record = self.record.model_copy(update={"start_seconds": seconds, "about": about})


class Cell(ABC):
    """The smallest part of a workload that one peer does before the next has its turn."""

    name: str

    @abstractmethod
    async def run(self, contender: Contender) -> str:
        """Measure; the figures go to the contender. Returns what to print. Raises BenchError."""


@dataclass
class Supply:
    """Prompts and the tokenizer they are counted with, the same for every peer; found at the first use."""

    args: argparse.Namespace
    tokenizer: str | None
    vocabulary: Vocabulary | None = None
    _found: bool = False
    _words: Prompts | None = None
    _text: TextPrompts | None = None

    async def find(self, contender: Contender) -> Vocabulary | None:
        """The tokenizer named or inside the GGUF; else of the first server asked."""
        if not self._found:
            self.vocabulary = await find_vocabulary(self.tokenizer, contender.client, contender.model)
            self._found = True
        return self.vocabulary

    async def prompts(self, contender: Contender, *, words: bool) -> Prompts:
        """A fresh source of prompts from the seed: every call makes the same ones again."""
        vocabulary = await self.find(contender)
        if self.args.text is not None and vocabulary is not None:
            if self._text is None:  # tokenized once
                self._text = await TextPrompts.build(vocabulary, self.args.text)
            return self._text.anew()
        rng = random.Random(self.args.seed)
        return await find_prompts(
            contender.client, vocabulary, contender.model, rng, words=words, text=self.args.text
        )

    async def distinct(self, contender: Contender, tokens: int, count: int) -> list[str]:
        """``count`` prompts that no call before has made."""
        if self._words is None:
            self._words = await self.prompts(contender, words=True)
        return [await self._words.make(tokens) for _ in range(count)]


@dataclass
class LatencyCell(Cell):
    """One category under one protocol: every peer is sent the same prompts."""

    args: argparse.Namespace
    supply: Supply
    category: Category
    protocol: Protocol
    runs: int
    warmup: int
    baseline: Baseline | None
    prompts: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.category.name}, {self.protocol}"

    async def run(self, contender: Contender) -> str:
        plan = latency.Plan(
            warmup=self.warmup,
            runs=self.runs,
            stream_runs=min(self.args.stream_runs, self.runs),
            endpoint=self.args.endpoint,
            stream_endpoint=self.args.endpoint,
            ignore_eos=not self.args.stop_at_eos,
            model=contender.model,
        )
        count = len(list(plan.passes()))
        if not self.prompts and self.protocol == "official":
            self.prompts = [FILLER * (self.category.prompt_tokens // FILLER_TOKENS)] * count
        elif not self.prompts:
            self.prompts = await self.supply.distinct(contender, self.category.prompt_tokens, count)
        done = await latency.measure(contender.client, plan, self.protocol, self.category, self.prompts)
        runs = await latency.recount(await self.supply.find(contender), done)
        measured = contender.measured
        everything = [*measured.runs, *runs]
        contender.measured = measured.model_copy(
            update={"runs": everything, "summaries": summarize(everything, self.baseline)}
        )
        contender.texts.setdefault(self.name, []).extend(text for run, text in done if not run.warmup)
        timed = [run.seconds for run in runs if not (run.warmup or run.streamed or run.error)]
        if not timed:
            first = next(run.error for run in runs if run.error)
            raise BenchError(f"every request failed, the first: {first}")
        return f"{1000 * median(timed):,.0f} ms"


@dataclass
class LevelCell(Cell):
    """One level of concurrency: every peer is sent the same requests, made anew for each from the seed."""

    args: argparse.Namespace
    supply: Supply
    level: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return at_once(self.args.workload, self.level)

    async def run(self, contender: Contender) -> str:
        if contender.workload is None:
            prompts = await self.supply.prompts(contender, words=self.args.workload != "random")
            contender.workload = throughput.make_workload(self.args, prompts)
        workload = contender.workload
        sender = throughput.Sender(
            client=contender.client,
            endpoint=workload.endpoint,
            max_tokens=self.args.output_tokens,
            ignore_eos=not self.args.stop_at_eos,
            stream=True,
            model=contender.model,
        )
        rng = random.Random(self.args.seed)
        sent, checks = await throughput.run_level(sender, workload, self.level, self._sizes(), rng)
        requests = await throughput.recount(await self.supply.find(contender), sent)
        level = summarize_level(requests, checks, sender.max_tokens)
        measured = contender.measured
        contender.measured = measured.model_copy(
            update={"levels": [*measured.levels, level], "requests": [*measured.requests, *requests]}
        )
        return f"{level.output_rate:,.0f} tok/s"

    def _sizes(self) -> argparse.Namespace:
        requests = requests_at(self.level, self.args.requests, self.args.waves)
        return argparse.Namespace(
            requests=requests, warmup=self.args.warmup, spot_checks=self.args.spot_checks
        )


def cells_of(args: argparse.Namespace, supply: Supply, baseline: Baseline | None) -> list[list[Cell]]:
    """The cells of each round. Timed runs are shared out over the rounds; later rounds warm up once."""
    rounds: list[list[Cell]] = []
    count = min(args.rounds, args.runs) if args.workload == "latency" else args.rounds
    for index in range(count):
        if args.workload == "latency":
            runs = len(range(index, args.runs, count))
            warmup = args.warmup if index == 0 else min(args.warmup, 1)
            protocols = PROTOCOLS if args.protocol == "both" else (args.protocol,)
            rounds.append(
                [
                    LatencyCell(args, supply, category, protocol, runs, warmup, baseline)
                    for category in args.categories
                    for protocol in protocols
                ]
            )
        else:
            rounds.append([LevelCell(args, supply, level) for level in args.levels])
    return rounds


async def hold(
    contenders: Sequence[Contender],
    rounds: Sequence[Sequence[Cell]],
    *,
    resident: bool,
    save: Callable[[], None],
) -> None:
    """Start, measure, stop; ``save`` is called after every cell. All servers are stopped when this returns,
    however it does."""
    try:
        for contender in contenders:
            await contender.client.__aenter__()
        if resident:
            await _start(contenders)
            save()
            for index, cells in enumerate(rounds):
                for turn, cell in enumerate(cells):
                    shift = (index + turn) % len(contenders)  # nobody is always first
                    for contender in [*contenders[shift:], *contenders[:shift]]:
                        await _visit(contender, cell, save)
            return
        for cells in rounds:
            for contender in contenders:
                await _start([contender])
                for cell in cells:
                    await _visit(contender, cell, save)
                await contender.process.stop()
    finally:
        await asyncio.shield(asyncio.gather(*(contender.process.stop() for contender in contenders)))
        for contender in contenders:
            await contender.client.__aexit__(None, None, None)


async def _start(contenders: Sequence[Contender]) -> None:
    alive = [contender for contender in contenders if contender.alive]
    outcomes = await start_all([contender.process for contender in alive])
    for contender, failure in zip(alive, outcomes, strict=True):
        if failure is not None:
            contender.fail(str(failure))
            continue
        try:
            await contender.started()
        except BenchError as error:
            contender.fail(str(error))
        else:
            seconds = f" after {contender.process.start_seconds:.1f} s" if contender.process.command else ""
            print(f"{contender.peer.name}: ready{seconds}", file=sys.stderr, flush=True)


async def _visit(contender: Contender, cell: Cell, save: Callable[[], None]) -> None:
    if not contender.alive:
        return
    ours = contender.peer.program == "server"
    before = await read_counters(contender.client) if ours else {}
    try:
        said = await cell.run(contender)
    except BenchError as error:
        log = "" if contender.process.running else f"; its log ends:\n{contender.process.tail()}"
        contender.fail(f"{cell.name}: {error}{log}")
    else:
        print(f"{contender.peer.name}: {cell.name}: {said}", file=sys.stderr, flush=True)
        if ours:
            contender.count(cell.name, growth(before, await read_counters(contender.client)))
    save()


def compare_answers(contenders: Sequence[Contender], reference: str) -> None:
    """Count, for each contender, the answers that equal the reference's to the same prompt."""
    base = next((one.texts for one in contenders if one.peer.name == reference), {})
    for one in contenders:
        same: dict[str, Any] = {}
        for name, texts in one.texts.items():
            pairs = list(zip(texts, base.get(name, []), strict=False))
            if pairs:
                same[name] = (sum(ours == theirs for ours, theirs in pairs), len(pairs))
        one.measured = one.measured.model_copy(update={"same_answers": same})
