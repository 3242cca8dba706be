"""What speculation is worth on texts that mean something: a model's held-out tasks, by drafter.

Starts one of this repository's servers for each drafter and sends every task to each of them in turn, one
request at a time and greedily, so that a busy machine slows all alike. Shows how much of the drafts was
accepted, how many tokens a verification brought, time per token beside drafting nothing, and whether the
answers are the same.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import environment
from bench.errors import BenchError, ServerError
from bench.launch.command import Setup, command_for
from bench.launch.peer import Peer
from bench.load.client import Client
from bench.options import HelpFormatter, add_output_options, positive, run
from bench.plot import PALETTE, figure
from bench.progress import Progress
from bench.publish import publish
from bench.results import Record, ResultFile
from bench.table import Cell, Table

DRAFTERS = ("off", "ngram", "mtp", "both")
HELDOUT = Path(__file__).resolve().parents[1] / "models" / "nano" / "heldout"


class Task(Record):
    """A request: messages, or a text to be continued as it is; and the group that it counts in."""

    group: str
    messages: tuple[dict[str, str], ...] = ()
    thinking: bool = False
    prompt: str | None = None


class Run(Record):
    """One answer. ``steps``: verifications of a draft; ``same``: the text is that without speculation."""

    drafter: str
    group: str
    seconds: float
    tokens: int
    steps: int
    drafted: int
    accepted: int
    same: bool


class Summary(Record):
    """All answers of a drafter in a group. ``speedup``: of the seconds a token, beside drafting nothing."""

    drafter: str
    group: str
    answers: int
    tokens: int
    seconds_per_token: float
    speedup: float | None
    drafted: int
    accepted: int
    accepted_share: float | None
    mean_accepted_length: float | None
    same: int


class SpeculationResult(ResultFile):
    """The result file of ``bench.speculation``."""

    kind: Literal["speculation"] = "speculation"
    settings: dict[str, str | int | bool]
    runs: list[Run]
    summaries: list[Summary]


def nano_tasks(folder: Path, n: int, seed: int) -> list[Task]:
    """`n` held-out tasks of each family, drawn with a seed; reasoning with thinking and without.

    Raises BenchError where a file is missing or has other fields.
    """
    tasks = []
    for family in ("knowledge", "instructions", "reasoning", "continuation"):
        rows = list(_rows(folder / f"{family}.jsonl"))
        for row in random.Random(f"{seed} {family}").sample(rows, min(n, len(rows))):
            if "messages" not in row and "prompt" in row and family == "continuation":
                tasks.append(Task(group="repeated text", prompt=row["prompt"]))
                continue
            messages = _messages(row, family)
            thinking = bool(row.get("thinking"))
            tasks.append(Task(group=family, messages=messages, thinking=thinking))
            if family == "reasoning":
                tasks.append(Task(group="reasoning, thinking", messages=messages, thinking=True))
    return tasks


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    yield from map(json.loads, lines)


def _messages(row: Mapping[str, Any], family: str) -> tuple[dict[str, str], ...]:
    if family == "continuation":
        return tuple(row["messages"])
    if family == "instructions":
        text = row["prompt"]
    elif family == "knowledge":
        options = "\n".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(row["options"]))
        text = f"Question: {row['question']}\nOptions:\n{options}\nAnswer: Let's think step by step."
    else:
        choices = "\n".join(f"({'ABCD'[i]}) {row[f'choice{i + 1}']}" for i in range(4))
        text = f"What is the correct answer to this question:{row['Question']}\nChoices:\n{choices}"
    return ({"role": "user", "content": text},)


async def answer(client: Client, task: Task, max_tokens: int) -> tuple[float, dict[str, Any]]:
    """One greedy answer: seconds, and the response. Raises ServerError."""
    path = "/v1/completions"
    body: dict[str, Any] = {"prompt": task.prompt, "max_tokens": max_tokens, "temperature": 0}
    if task.prompt is None:
        del body["prompt"]
        path = "/v1/chat/completions"
        body |= {"messages": task.messages, "chat_template_kwargs": {"enable_thinking": task.thinking}}
    reply = await client.request("POST", path, body=body)
    if reply.status != 200:
        raise ServerError(f"POST {path} answered {reply.status}: {reply.text[:200]}", reply.status)
    return reply.seconds, dict(reply.json())


async def measure(args: argparse.Namespace) -> list[Run]:
    """Every task to every drafter's server; one more of the first before, to warm up."""
    tasks = nano_tasks(args.tasks, args.items, args.seed)
    setup = Setup(
        gguf=args.model,
        parallel=1,
        request_tokens=args.context,
        threads=args.threads,
        binaries=Path(),
        python=sys.executable,
        logs=args.logs,
        start_timeout=args.timeout,
    )
    always = ("--draft-always",) if args.always else ()
    runs: list[Run] = []
    async with AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for drafter in args.drafters:
            peer = Peer(drafter, "server", ("--speculation", drafter, "--log-level", "warning", *always))
            server = await stack.enter_async_context(command_for(peer, setup))
            clients[drafter] = await stack.enter_async_context(Client(server.url, timeout=args.timeout))
            await answer(clients[drafter], tasks[0], args.max_tokens)
        with Progress("tasks", total=len(tasks), unit="task") as progress:
            for task in tasks:
                expected = None
                for drafter, client in clients.items():
                    seconds, response = await answer(client, task, args.max_tokens)
                    text = json.dumps(response["choices"][0])
                    expected = expected or text
                    counts = response["usage"].get("speculation", {})
                    runs.append(
                        Run(
                            drafter=drafter,
                            group=task.group,
                            seconds=seconds,
                            tokens=response["usage"]["completion_tokens"],
                            steps=counts.get("steps", 0),
                            drafted=counts.get("drafted", 0),
                            accepted=counts.get("accepted", 0),
                            same=text == expected,
                        )
                    )
                progress.advance()
    return runs


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """By group and drafter, in the order of the runs; the first drafter is what the others are beside."""
    drafters, groups = (
        list(dict.fromkeys(getattr(run, name) for run in runs)) for name in ("drafter", "group")
    )
    summaries = []
    for group in groups:
        first = None
        for drafter in drafters:
            mine = [run for run in runs if (run.drafter, run.group) == (drafter, group)]
            tokens, steps = sum(run.tokens for run in mine), sum(run.steps for run in mine)
            drafted, accepted = sum(run.drafted for run in mine), sum(run.accepted for run in mine)
            each = sum(run.seconds for run in mine) / max(tokens, 1)
            first = first or each
            summaries.append(
                Summary(
                    drafter=drafter,
                    group=group,
                    answers=len(mine),
                    tokens=tokens,
                    seconds_per_token=each,
                    speedup=first / each if drafter != drafters[0] and each else None,
                    drafted=drafted,
                    accepted=accepted,
                    accepted_share=accepted / drafted if drafted else None,
                    mean_accepted_length=accepted / steps if steps else None,
                    same=sum(run.same for run in mine),
                )
            )
    return summaries


def tables(result: SpeculationResult) -> list[Table]:
    """One table: a line for each group and drafter."""
    rows: list[list[Cell]] = [
        [
            s.group,
            s.drafter,
            s.tokens,
            1000 * s.seconds_per_token,
            s.speedup,
            s.drafted,
            s.accepted_share,
            s.mean_accepted_length,
            f"{s.same}/{s.answers}",
        ]
        for s in result.summaries
    ]
    header = ("group", "drafter", "tokens", "ms/token", "speed-up", "drafted", "accepted", "a draft", "same")
    return [
        Table(
            header,
            rows,
            title="Speculation on held-out tasks, one request at a time",
            notes=(
                "ms/token: of whole requests, prompts included; speed-up: beside the first drafter",
                "accepted: share of the drafted tokens; a draft: accepted tokens each; same: equal texts",
            ),
        )
    ]


def draw(result: SpeculationResult, path: Path) -> None:
    """Milliseconds a token, a bar for each drafter, by group."""
    groups = list(dict.fromkeys(s.group for s in result.summaries))
    drafters = list(dict.fromkeys(s.drafter for s in result.summaries))
    with figure(path) as (axes,):
        width = 0.8 / len(drafters)
        for index, drafter in enumerate(drafters):
            mine = [s for s in result.summaries if s.drafter == drafter]
            places = [groups.index(s.group) + (index - (len(drafters) - 1) / 2) * width for s in mine]
            heights = [1000 * s.seconds_per_token for s in mine]
            axes.bar(places, heights, width, label=drafter, color=PALETTE[index % len(PALETTE)])
        axes.set_xticks(range(len(groups)), groups)
        axes.set_ylabel("milliseconds a token")
        axes.legend()


def drafters_of(text: str) -> list[str]:
    """An argparse type: comma-separated drafters."""
    names = text.split(",")
    if unknown := [name for name in names if name not in DRAFTERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: want some of {', '.join(DRAFTERS)}")
    return names


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python bench/speculation.py", description=__doc__, formatter_class=HelpFormatter
    )
    result.add_argument("--model", type=Path, required=True, help="the GGUF to serve")
    result.add_argument("--drafters", type=drafters_of, default=list(DRAFTERS), help="in this order")
    result.add_argument("--tasks", type=Path, default=HELDOUT, help="folder of held-out tasks")
    result.add_argument("--items", type=positive, default=20, help="tasks of each family")
    result.add_argument("--max-tokens", type=positive, default=256, help="of an answer")
    result.add_argument("--context", type=positive, default=2048, help="tokens of the longest request")
    result.add_argument("--always", action="store_true", help="draft whenever possible, not by what pays")
    result.add_argument("--threads", type=int, default=0, help="CPU threads of a server; 0 is its own choice")
    result.add_argument("--timeout", type=float, default=600.0, help="seconds a request or a start may take")
    result.add_argument("--logs", type=Path, default=Path("/tmp/speculation-logs"), help="of the servers")
    result.add_argument("--seed", type=int, default=0, help="of the choice of tasks")
    result.add_argument("--card", help="the graphics card, for the record (asked locally otherwise)")
    add_output_options(result)
    return result


async def main(args: argparse.Namespace) -> int:
    """The verb."""
    started, began = datetime.now(UTC).replace(microsecond=0), perf_counter()
    runs = await measure(args)
    url = "http://127.0.0.1"
    result = SpeculationResult(
        command=args.command,
        url=url,
        model=args.model.name,
        started=started,
        seconds=perf_counter() - began,
        host=environment.host(),
        card=environment.card(url, args.card),
        versions=environment.versions(),
        settings={
            "items": args.items,
            "max_tokens": args.max_tokens,
            "always": args.always,
            "seed": args.seed,
        },
        runs=runs,
        summaries=summarize(runs),
    )
    publish(result, args, tables, draw)
    return 0


if __name__ == "__main__":
    sys.exit(run(parser(), main))
