"""How late the benchmark's own client is: what it adds to every time that it reports.

A trivial server in a process of its own streams pieces at a fixed rate and writes into each when it was
sent. Both processes read one monotonic clock, so a piece's delay is the network stack's and the client's.
What is not far below a benchmark's figures distorts them.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Literal

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from aiohttp import web

from bench import environment
from bench.load.client import Client
from bench.measures import Spread
from bench.options import HelpFormatter, positive, positives, run
from bench.plot import PALETTE, figure
from bench.progress import Progress
from bench.publish import publish
from bench.results import Record, ResultFile
from bench.table import Cell, Table

PATH = "/v1/completions"


class Level(Record):
    """One level. ``delay``: seconds from sending to stamping; ``busy``: the client's share of a core.

    ``whole_request``: as many unstreamed requests sent at the same moment, answered at once.
    """

    concurrency: int
    pieces: int
    pieces_per_second: float
    delay: Spread
    whole_request: Spread
    busy: float


class OverheadResult(ResultFile):
    """The result file of ``bench.overhead``."""

    kind: Literal["overhead"] = "overhead"
    settings: dict[str, float]
    levels: list[Level]


def serve(port: Connection) -> None:
    """The trivial server: ``prompt`` is the pieces a second, ``max_tokens`` their number."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            usage = {"prompt_tokens": 1, "completion_tokens": 1}
            return web.json_response({"choices": [{"text": "", "finish_reason": "length"}], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        due = perf_counter()
        for _ in range(body["max_tokens"]):
            due += 1 / float(body["prompt"])
            await asyncio.sleep(due - perf_counter())
            choice = {"index": 0, "text": repr(perf_counter()) + " ", "finish_reason": None}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def main() -> None:
        app = web.Application()
        app.router.add_post(PATH, answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


async def measure(client: Client, concurrency: int, rate: float, tokens: int) -> Level:
    """``concurrency`` streams side by side, then as many rounds of instant requests."""
    body = {"prompt": str(rate), "max_tokens": tokens}
    await asyncio.gather(*(client.stream(PATH, {**body, "max_tokens": 2}) for _ in range(concurrency)))
    cpu, began = process_time(), perf_counter()
    streams = await asyncio.gather(*(client.stream(PATH, body) for _ in range(concurrency)))
    cpu, seconds = process_time() - cpu, perf_counter() - began
    delays = [
        done.started + arrival - float(sent)
        for done in streams
        for arrival, sent in zip(done.arrivals, done.text.split(), strict=True)
    ]
    wholes = [
        done.seconds
        for _ in range(20)
        for done in await asyncio.gather(*(client.complete(PATH, body) for _ in range(concurrency)))
    ]
    delay, whole = Spread.of(delays), Spread.of(wholes)
    assert delay is not None
    assert whole is not None
    return Level(
        concurrency=concurrency,
        pieces=len(delays),
        pieces_per_second=len(delays) / seconds,
        delay=delay,
        whole_request=whole,
        busy=cpu / seconds,
    )


async def overhead(args: argparse.Namespace) -> int:
    """The verb: start the server, measure every level, print, save."""
    began = perf_counter()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        args.url = f"http://127.0.0.1:{await asyncio.to_thread(ours.recv)}"
        async with Client(args.url) as client:
            head = await environment.header(args, client, None)
            levels = []
            with Progress("client overhead", total=len(args.levels), unit="level") as bar:
                for level in args.levels:
                    levels.append(await measure(client, level, args.rate, args.tokens))
                    bar.advance()
    finally:
        process.terminate()
    result = OverheadResult(
        **head,
        seconds=perf_counter() - began,
        settings={"pieces per second and stream": args.rate, "pieces": args.tokens},
        levels=levels,
    )
    publish(result, args, lambda result: [table(result)], draw)
    return 0


def table(result: OverheadResult) -> Table:
    """A line a level, milliseconds."""
    rows: list[list[Cell]] = [
        [
            str(level.concurrency),
            level.pieces_per_second,
            *(1000 * value for value in (level.delay.p50, level.delay.p90, level.delay.p99)),
            *(1000 * value for value in (level.whole_request.p50, level.whole_request.p99)),
            f"{100 * level.busy:.0f}%",
        ]
        for level in result.levels
    ]
    header = ["streams", "pieces/s", "delay p50 ms", "p90", "p99", "empty request p50 ms", "p99", "core used"]
    return Table(header, rows, title="What the client adds")


def draw(result: OverheadResult, path: Path) -> None:
    """Delay against the number of streams."""
    x = [level.concurrency for level in result.levels]
    with figure(path, title="What the client adds to each arrival", width=6, height=3.6) as axes:
        for colour, name in ((PALETTE[0], "p50"), (PALETTE[1], "p90"), (PALETTE[3], "p99")):
            delays = [1000 * float(getattr(level.delay, name)) for level in result.levels]
            axes[0].plot(x, delays, "o-", color=colour, label=name)
        axes[0].set_xscale("log", base=2)
        axes[0].set_xticks(x, [str(at) for at in x])
        axes[0].set_ylim(bottom=0)
        axes[0].set_xlabel("concurrent streams")
        axes[0].set_ylabel("milliseconds")
        axes[0].legend()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python bench/overhead.py", description=__doc__, formatter_class=HelpFormatter
    )
    made.add_argument("--levels", type=positives, default=[1, 4, 16, 64], help="concurrent streams")
    made.add_argument("--rate", type=float, default=50.0, help="pieces a second in each stream")
    made.add_argument("--tokens", type=positive, default=200, help="pieces a stream")
    made.add_argument("--out", type=Path, help="results file (JSON); the picture goes beside it as .png")
    made.add_argument("--plot", type=Path, help="the picture's own file (.png, .svg or .pdf)")
    made.set_defaults(card="none", url="")
    return made


if __name__ == "__main__":
    sys.exit(run(parser(), overhead))
