"""Checks that answers do not depend on other requests: the same requests, alone and together, bit for bit.

The first server answers requests of all kinds one by one. Then each server answers them one by one and many
at once, each time in another order, while other clients disconnect in the middle of their answers. The whole
choice is compared: text, reasoning, tool calls, and the log-probabilities of every token and its
alternatives, to the last digit. Some kinds of requests (`kinds.py`) want no log-probabilities, since a server
then computes less and launches steps ahead; one wants those of its prompt.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from qwen_serve.bench.arguments import Positive, Positives, PromptOptions, StoreOptions
from qwen_serve.bench.errors import BenchError, ServerError
from qwen_serve.bench.load.cell import PromptSource
from qwen_serve.bench.load.client import clip, error_text
from qwen_serve.bench.load.counters import DRAFT_COUNTERS, growth, read_counters
from qwen_serve.bench.load.generator import Job, Sender, Target
from qwen_serve.bench.load.kinds import KINDS, TURNS, job_of, prefixes_of
from qwen_serve.bench.load.prompts import Prompts
from qwen_serve.bench.load.protocol import at_concurrency
from qwen_serve.bench.load.soak import leave
from qwen_serve.bench.servers.peers import PeerOptions, contestants, make_setup
from qwen_serve.bench.servers.programs import SYNTAX
from qwen_serve.bench.servers.turns import Contender
from qwen_serve.bench.store import Run
from qwen_serve.bench.terminal import Bar, Table
from qwen_serve.common.files import write_text

WORKLOAD = "answers"
VERDICT = "verdict.json"
SHOWN = 10
"""Differences that the verdict lists."""

SPECULATION = ("off", "ngram", "mtp", "both")
"""Values of --speculation; each has a server of its own."""

Share = Annotated[float, Parameter(validator=Number(gte=0, lt=1))]


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation and its kind."""

    kind: str
    job: Job


@dataclass
class Compared:
    """Results of a server at one level of concurrency. ``same``: how many of the ``compared`` answers equal
    those given alone."""

    compared: int = 0
    same: int = 0
    left: int = 0
    """Clients that disconnected in the middle of an answer."""
    differences: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    """Draft metrics, by name."""

    def add(self, asked: Asked, alone: Sequence[str], found: Sequence[str]) -> None:
        """Compare the answers of a conversation, turn by turn, with those given alone."""
        for turn, (before, now) in enumerate(zip(alone, found, strict=False)):
            self.compared += 1
            self.same += before == now
            if before != now:
                at = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), 0)
                around = slice(max(0, at - 100), at + 100)
                told = {"kind": asked.kind, "turn": turn, "character": at, "characters": len(before)}
                self.differences.append(told | {"alone": before[around], "here": now[around]})


@dataclass(frozen=True)
class Load:
    """The load: the same conversations at every level, and clients that disconnect."""

    asked: Sequence[Asked]
    tokens: int
    aborts: float
    seed: int

    async def alone(self, target: Target) -> list[list[str]]:
        """The answers to each conversation, requested one after the other. Raises BenchError if one fails."""
        with Bar(f"{target.name}, alone", total=len(self.asked), unit="conversations") as bar:
            found = []
            for one in self.asked:
                found.append(await converse(Sender(target, self.tokens), one.job))
                bar.advance()
        return found

    async def at(self, target: Target, clients: int, alone: Sequence[Sequence[str]], found: Compared) -> None:
        """Run all conversations with this many clients, and add the results to `found`."""
        rng = random.Random(f"{self.seed}/{target.name}/{clients}")
        order = rng.sample(range(len(self.asked)), len(self.asked))
        sender, left = Sender(target, self.tokens), iter(order)

        async def client() -> None:
            for number in left:
                if rng.random() < self.aborts:
                    found.left += await leave(sender, rng.choice(self.asked).job, rng.randint(1, 8))
                asked = self.asked[number]
                try:
                    found.add(asked, alone[number], await converse(sender, asked.job))
                except BenchError as error:
                    found.errors.append(f"{asked.kind}: {error}")
                bar.advance(note=f"{found.compared - found.same} differ")

        before = await read_counters(target.client)
        with Bar(f"{target.name}, {at_concurrency(clients)}", total=len(order), unit="conversations") as bar:
            await asyncio.gather(*(client() for _ in range(clients)))
        for (name, _), value in growth(before, await read_counters(target.client)).items():
            if name in DRAFT_COUNTERS:
                metric = DRAFT_COUNTERS[name]
                found.counters[metric] = found.counters.get(metric, 0.0) + value


async def converse(sender: Sender, job: Job) -> list[str]:
    """The choice of each turn, as JSON without the ids of tool calls. Raises BenchError for a failed
    request."""
    history: list[Mapping[str, Any]] = []
    told: list[str] = []
    for text in job.turns:
        history.append({"role": "user", "content": text})
        path = sender.path(job)
        reply = await sender.target.client.request("POST", path, body=sender.body(job, history))
        if reply.status != 200:
            raise ServerError(f"POST {path} answered {reply.status}: {error_text(reply)}", reply.status)
        try:
            choice = reply.json()["choices"][0]
            message = choice.get("message") or {}
            for call in message.get("tool_calls") or ():
                call.pop("id", None)
        except (LookupError, TypeError, AttributeError) as error:
            raise ServerError(f"POST {path}: no choice in the answer: {clip(reply.text)}", 200) from error
        if job.fields.get("logprobs") is not None and not choice.get("logprobs"):
            raise ServerError(f"POST {path}: no log-probabilities in the answer: {clip(reply.text)}", 200)
        told.append(json.dumps(choice, sort_keys=True))
        history.append({"role": "assistant", "content": message.get("content") or ""})
    return told


async def conversations(made: Prompts, count: int, tokens: int, rng: random.Random) -> list[Asked]:
    """``count`` conversations of all kinds, with up to ``tokens`` tokens a turn. They depend only on the
    state of ``rng``."""
    prefixes, names = await prefixes_of(made, tokens, rng), [*KINDS]
    return [
        Asked(name, await job_of(name, made, tokens, prefixes, rng, number))
        for number in range(count)
        for name in [names[number % len(names)]]
    ]


def usual_peers(draft_model: Path | None, flags: str) -> tuple[str, ...]:
    """The default servers: one without drafts and prefix cache, and one for each value of `SPECULATION`."""
    server = f"server --deterministic {flags}".strip()
    peers = [f"alone={server} --speculation off --no-prefix-cache"]
    peers += [f"drafts {way}={server} --speculation {way}" for way in SPECULATION]
    if draft_model is not None:
        peers.append(f"draft model={server} --speculation draft --draft-model {draft_model.resolve()}")
    return tuple(peers)


async def answers(
    *,
    who: PeerOptions = PeerOptions(),
    draft_model: Path | None = None,
    flags: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    requests: Positive = 72,
    levels: Positives = (1, 8, 64),
    input_tokens: Positive = 256,
    output_tokens: Positive = 64,
    aborts: Share = 0.1,
    start_ahead: bool = False,
    prompts: PromptOptions = PromptOptions(),
    store: StoreOptions = StoreOptions(),
) -> int:
    if not who.peer:
        who = replace(who, peer=usual_peers(draft_model, flags))
    elif draft_model is not None or flags:
        raise BenchError("--draft-model and --flags are for the usual servers: say it in --peer")
    found, reference = contestants(who)
    if prompts.tokenizer is None and who.gguf is not None:
        prompts = replace(prompts, tokenizer=str(who.gguf))
    # a text twice or behind a prefix, later turns, answers, a tool's description
    longest = 3 * input_tokens + TURNS * (output_tokens + input_tokens // 8) + 512
    setup = make_setup(who, (longest, max(levels)), found)
    settings = {
        "requests": requests,
        "levels": list(levels),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "aborts": aborts,
        **prompts.settings(),
    }
    with store.begin("answers", settings) as run:
        setup = replace(setup, logs=run.folder / "logs")
        others = sorted(found, key=lambda peer: peer.name != reference)
        told: dict[str, dict[str, Compared]] = {}
        load: Load | None = None
        alone: list[list[str]] = []
        try:
            made = [
                Contender.of(peer, setup, run, timeout=who.timeout, api_key=who.api_key) for peer in others
            ]
            async with aclosing(_each_running(made, ahead=start_ahead)) as running:
                async for one in running:
                    await one.started(run)
                    if load is None:
                        source = await PromptSource.of(one.target.client, one.target.model, prompts)
                        rng = random.Random(prompts.seed)
                        asked = await conversations(await source.prompts(), requests, input_tokens, rng)
                        load = Load(asked, output_tokens, aborts, prompts.seed)
                        alone = await load.alone(one.target)
                    await _levels(load, one.target, run, levels, alone, told.setdefault(one.peer.name, {}))
        except asyncio.CancelledError:
            _verdict(run, told, levels, stopped=True)
            raise
        return _verdict(run, told, levels)


answers.__doc__ = f"""Check that answers do not depend on other requests: alone and together, bit for bit.

- `qwen-bench soak answers --gguf model.gguf --requests 140`
- `qwen-bench soak answers --gguf model.gguf --draft-model drafter.gguf --levels 1,64`

The first server answers each request alone. Then every server answers the same requests at each level of
concurrency. The requests are greedy and seeded: chats, shared prefixes, texts that repeat, schemas,
grammars, thinking, tool calls, penalties, biases and scored prompts. Each server is started on a free
port, and stopped before the next. Without --peer the first is `server --deterministic` without drafts and
prefix cache; the others have a value of --speculation each.

A table says what was sent, compared and refused. The last line is the verdict. {VERDICT} in the run's
folder has the details, even if the run is stopped. The exit status is 0 if nothing differs.

{SYNTAX}

Parameters
----------
draft_model
    GGUF of a block drafter, for a further default server.
flags
    Further flags of each default server.
requests
    Number of conversations; a chat has three turns.
levels
    Numbers of concurrent clients.
input_tokens
    Maximum tokens of a text in a request.
output_tokens
    Maximum tokens of an answer.
aborts
    Share of requests before which the client starts another one and disconnects in the middle of its answer.
start_ahead
    Start the next server while one answers, which is faster but needs memory for two.
"""


async def _each_running(contenders: Sequence[Contender], *, ahead: bool) -> AsyncGenerator[Contender]:
    """Each contender while its server runs, one after the other. ``ahead``: the next server starts
    meanwhile."""
    starting: asyncio.Task[None] | None = None
    try:
        for number, one in enumerate(contenders, start=1):
            await (starting or one.process.start())
            starting = None
            if ahead and number < len(contenders):
                starting = asyncio.create_task(contenders[number].process.start())
            async with one.target.client:
                yield one
            await one.process.stop()
    finally:
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await asyncio.shield(asyncio.gather(*(one.process.stop() for one in contenders)))


async def _levels(
    load: Load,
    target: Target,
    run: Run,
    levels: Sequence[int],
    alone: Sequence[Sequence[str]],
    found: dict[str, Compared],
) -> None:
    for clients in levels:
        cell = at_concurrency(clients)
        one = found[cell] = Compared()
        await load.at(target, clients, alone, one)
        values = {"compared_answers": one.compared, "same_answers": one.same, "aborted": one.left}
        run.add(target.name, WORKLOAD, cell, 1, {name: float(value) for name, value in values.items()})
        if one.counters:
            run.add(target.name, WORKLOAD, cell, 1, one.counters)


def _table(told: Mapping[str, Mapping[str, Compared]]) -> Table:
    """What each server was sent at each level, and what became of it."""
    lines: list[dict[str, str | int]] = [
        {
            "server": server,
            "at once": cell.removesuffix(" concurrent"),
            "sent": one.compared + len(one.errors) + one.left,
            "compared": one.compared,
            "differ": one.compared - one.same,
            "refused": len(one.errors),
            "clients left": one.left,
        }
        for server, cells in told.items()
        for cell, one in cells.items()
    ]
    return Table.of(lines, title="Answers compared with those given alone")


def _verdict(
    run: Run, told: Mapping[str, Mapping[str, Compared]], levels: Sequence[int], *, stopped: bool = False
) -> int:
    """Print the verdict and write it to the run. Returns 0 if everything was compared, no answer differs and
    no request failed, else 1."""
    parts = [(server, cell, one) for server, cells in told.items() for cell, one in cells.items()]
    sums = Counter[str]()
    for _, _, one in parts:
        sums.update(compared=one.compared, same=one.same, left=one.left, failed=len(one.errors))
        sums.update({name: round(value) for name, value in one.counters.items()})
    differ = sums["compared"] - sums["same"]
    right = bool(sums["compared"]) and not differ and not sums["failed"]
    word = "NOT THE SAME" if not right else "SAME, BUT STOPPED EARLY" if stopped else "SAME"
    line = (
        f"{word}: {sums['compared']:,} answers of {len(told)} servers at "
        f"{', '.join(map(str, levels))} at once, {differ:,} differ from those alone, "
        f"{sums['failed']:,} failed; "
        f"{sums['accepted_tokens']:,} of {sums['drafted_tokens']:,} drafted tokens accepted, "
        f"{sums['left']:,} clients left"
    )
    differences = [
        {"server": server, "level": cell, **each} for server, cell, one in parts for each in one.differences
    ]
    errors = [f"{server}, {cell}: {error}" for server, cell, one in parts for error in one.errors]
    whole = {
        "same": right and not stopped,
        "verdict": line,
        **{name: sums[name] for name in ("compared", "left", "failed")},
        "differ": differ,
        "servers": {
            server: {
                cell: {"compared": one.compared, "same": one.same, "left": one.left, **one.counters}
                for cell, one in cells.items()
            }
            for server, cells in told.items()
        },
        "differences": differences[:SHOWN],
        "errors": errors[:SHOWN],
    }
    write_text(run.folder / VERDICT, json.dumps(whole, indent=1) + "\n")
    _table(told).print()
    for error in errors[:1]:
        print(f"the first failure: {error}")
    for each in differences[:1]:
        print(f"the first difference: {json.dumps(each)}")
    print(line)
    return 0 if right else 1
