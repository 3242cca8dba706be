"""How late the benchmark's own client is: what it adds to every time that it reports.

A trivial server in a process of its own streams chunks at a fixed rate and writes into each when it was sent.
Both processes read one monotonic clock, so a chunk's delay is the network stack's and the client's. What is
not far below a benchmark's figures distorts them.
"""

import asyncio
import json
import multiprocessing
from multiprocessing.connection import Connection
from time import perf_counter, process_time

from aiohttp import web

from bench.arguments import Positive, Positives, StoreOptions
from bench.load.client import Client
from bench.load.protocol import at_concurrency
from bench.report.views import show
from bench.store import Results, Run
from bench.terminal import Bar, Cell, Table

PATH = "/v1/completions"
SUBJECT, WORKLOAD = "client", "overhead"
WHOLE_REQUESTS = 20


def serve(port: Connection) -> None:
    """The trivial server: ``prompt`` is the chunks a second, ``max_tokens`` their number."""

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

    async def run() -> None:
        app = web.Application()
        app.router.add_post(PATH, answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


async def overhead(
    *,
    levels: Positives = (1, 4, 16, 64),
    rate: float = 50.0,
    tokens: Positive = 200,
    store: StoreOptions = StoreOptions(),
) -> int:
    """What this client adds to every time that it measures, by the number of its streams.

    Parameters
    ----------
    levels
        Concurrent streams.
    rate
        Chunks a second in each stream.
    tokens
        Chunks of a stream.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        url = f"http://127.0.0.1:{await asyncio.to_thread(ours.recv)}"
        settings = {"levels": levels, "rate": rate, "tokens": tokens}
        with store.begin("overhead", settings) as run:
            async with Client(url) as client:
                with Bar("client overhead", total=len(levels), unit="levels") as bar:
                    for level in levels:
                        await _measure(run, client, level, rate, tokens)
                        bar.advance()
            show(run)
    finally:
        process.terminate()
        process.join()
    return 0


async def _measure(run: Run, client: Client, level: int, rate: float, tokens: int) -> None:
    """``level`` streams side by side, then as many instant requests at the same moment, some times."""
    body = {"prompt": str(rate), "max_tokens": tokens}
    await asyncio.gather(*(client.stream(PATH, {**body, "max_tokens": 2}) for _ in range(level)))
    cpu, began = process_time(), perf_counter()
    streams = await asyncio.gather(*(client.stream(PATH, body) for _ in range(level)))
    cpu, seconds = process_time() - cpu, perf_counter() - began
    cell, chunks = at_concurrency(level), 0
    for done in streams:
        for arrival, sent in zip(done.arrivals, done.text.split(), strict=True):
            chunks += 1
            run.add(SUBJECT, WORKLOAD, cell, 1, {"delay": 1000 * (done.started + arrival - float(sent))})
    for _ in range(WHOLE_REQUESTS):
        for done in await asyncio.gather(*(client.complete(PATH, body) for _ in range(level))):
            run.add(SUBJECT, WORKLOAD, cell, 1, {"latency": 1000 * done.seconds})
    run.add(SUBJECT, WORKLOAD, cell, 1, {"chunk_rate": chunks / seconds, "client_load": cpu / seconds})


def overhead_tables(results: Results) -> list[Table]:
    """One table, a line a level."""
    lines: list[dict[str, Cell]] = []
    for cell, rows in results.frame.groupby("cell", sort=False):
        values = {str(metric): some for metric, some in rows.groupby("metric")["value"]}
        line: dict[str, Cell] = {"streams": str(cell), "chunks/s": float(values["chunk_rate"].iloc[0])}
        for title, metric in (("delay", "delay"), ("empty request", "latency")):
            for percent in (50, 90, 99):
                line[f"{title} p{percent} ms"] = float(values[metric].quantile(percent / 100))
        lines.append({**line, "core used": f"{values['client_load'].iloc[0]:.0%}"})
    return [Table.of(lines, title="What the client adds")]
