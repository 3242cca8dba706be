"""Compares servers on one model and one workload, in turns: ratios against one of them, with intervals."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from qwen_serve.bench.analysis.statistics import DEFAULT_ROUNDS
from qwen_serve.bench.arguments import SERVERS_GROUP, Natural, Positive, PromptOptions, StoreOptions
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.gate import NANO_FOLDER
from qwen_serve.bench.load.cell import Cell, PromptSource
from qwen_serve.bench.load.generator import Target
from qwen_serve.bench.load.latency import (
    ANSWER_TOKENS,
    QUESTION_TOKENS,
    Categories,
    Protocol,
    latency_cells,
)
from qwen_serve.bench.load.protocol import ALL_CATEGORIES, IMAGES, WARM_UPS
from qwen_serve.bench.load.tasks import task_cells
from qwen_serve.bench.load.throughput import Kind, LoadOptions, refuse_text
from qwen_serve.bench.report.views import show
from qwen_serve.bench.servers.builds import build_programs, this_machines_flavour
from qwen_serve.bench.servers.programs import SYNTAX, Peer, Setup, parse_peer
from qwen_serve.bench.servers.turns import Contender, Turns

ALLOCATION = 256
"""llama.cpp allocates KV cells in multiples of this number."""

TEMPLATE_TOKENS = 64
"""Tokens that a chat template may add to a prompt."""

ROOM = 2
"""Context of each server, as a multiple of what running requests need. qwen-serve keeps cached prompts in the
rest, llama-server each slot's last prompt."""

LEVELS = (1, 8, 64)
SLOTS_AT_A_RATE = 32
LONGEST_TASK = 3072
"""Maximum tokens of a held-out task, with a margin."""


@Parameter(name="*", group=SERVERS_GROUP)
@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Servers to compare, and their resources."""

    peer: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Server to compare, as [NAME=]WHAT [FLAGS], see above; once for each server."""
    reference: str | None = None
    """Name of the server that ratios refer to (default: the first --peer)."""
    gguf: Path | None = None
    """GGUF file of the model that all servers are started with."""
    binaries: Path | None = None
    """Folder of llama.cpp's programs (default: built from llama-cpp-python's sources)."""
    python: str = sys.executable
    """Python interpreter for servers written in Python."""
    threads: Natural = 0
    """CPU threads of each server; 0: the server's default."""
    slots: Positive | None = None
    """Slots of each server, the maximum of concurrent requests (default: as many as the workload sends)."""
    context: Positive | None = None
    """Context of each server in tokens, for all slots together (default: twice what the workload needs)."""
    start_timeout: float = 300.0
    """Time limit of a server's start, in seconds."""
    residency: Literal["auto", "all", "one"] = "auto"
    """all: run all servers at once and visit them in turns; one: run one after another; auto: all, except
    with vLLM."""
    timeout: float = 600.0
    """Time limit of a request, in seconds."""
    api_key: Annotated[str | None, Parameter(env_var="QWEN_BENCH_API_KEY")] = None
    """API key, sent as a bearer token."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of all servers in each round."""

    workload: Literal["latency", "tasks", Kind] = "latency"
    """Kind of requests. latency: one request at a time; tasks: held-out tasks; the others: as in qwen-bench
    throughput."""
    rounds: Positive = DEFAULT_ROUNDS
    """Rounds, in each of which every server is measured once. Fewer than 10 cannot settle differences below
    10%."""
    limit: Annotated[float | None, Parameter(validator=Number(gt=0))] = None
    """Seconds after which no further round begins (default: no limit). At least one is measured."""
    protocol: Protocol = "both"
    """latency: official repeats a prompt, distinct has another one each time, both is these two, images asks
    about pictures."""
    categories: Categories = ALL_CATEGORIES
    """latency: one or more of short, medium and long."""
    runs: Positive = 1
    """latency: timed requests of each category in each round."""
    stream_runs: Natural = 0
    """latency: additional streamed requests of each category in each round, for TTFT and ITL."""
    nano: Path = NANO_FOLDER
    """tasks: folder of a model with heldout/ and reference.json, from which prompts are taken."""
    items: Positive = 20
    """tasks: number of tasks of each gate, and of texts to continue."""
    max_tokens: Positive = 256
    """tasks: maximum tokens of an answer."""

    def size(self, load: LoadOptions) -> tuple[int, int]:
        """(tokens of the longest request with its answer, maximum of concurrent requests)."""
        if self.workload == "latency" and self.protocol == IMAGES:
            return load.image_resolution.tokens + QUESTION_TOKENS + ANSWER_TOKENS + TEMPLATE_TOKENS, 1
        if self.workload == "latency":
            return max(one.prompt_tokens + one.max_tokens for one in self.categories) + TEMPLATE_TOKENS, 1
        if self.workload == "tasks":
            return LONGEST_TASK + self.max_tokens, 1
        turn = load.longest(self.workload) + TEMPLATE_TOKENS
        turn += load.prefix_tokens if self.workload == "shared-prefix" else 0
        turn += load.image_count * load.image_resolution.tokens if self.workload == IMAGES else 0
        most = max(*load.chosen_levels(LEVELS), *([SLOTS_AT_A_RATE] if load.rate else []), 1)
        return turn * (load.turns if self.workload == "chat" else 1), most

    def settings(self, load: LoadOptions) -> dict[str, Any]:
        """The settings of this workload, for the manifest."""
        made: dict[str, Any] = {"workload": self.workload, "rounds": self.rounds, "limit": self.limit}
        if self.workload == "latency":
            categories = [one.name for one in self.categories]
            made |= {"protocol": self.protocol, "categories": categories, "runs": self.runs}
            if self.protocol == IMAGES:
                made |= {"image_resolution": str(load.image_resolution)}
                made |= {"input_tokens": QUESTION_TOKENS, "output_tokens": ANSWER_TOKENS}
            return {**made, "stream_runs": self.stream_runs, "warmup": load.warmup}
        if self.workload == "tasks":
            return {**made, "items": self.items, "max_tokens": self.max_tokens}
        return {**made, **load.settings(self.workload, LEVELS)}

    def cells(self, source: PromptSource, load: LoadOptions) -> Sequence[Cell]:
        """A cell for each category and protocol, level or rate, or group of tasks."""
        if self.workload == "tasks":
            given = {"max_tokens": self.max_tokens, "rounds": self.rounds}
            return task_cells(self.nano, self.items, source, **given)
        if self.workload != "latency":
            return load.cells(self.workload, source, LEVELS, self.rounds)
        endpoint = load.endpoint or "/v1/completions"  # all servers have this endpoint
        return latency_cells(
            self.categories,
            self.protocol,
            source,
            endpoints=(endpoint, endpoint),
            warmup=WARM_UPS if load.warmup is None else load.warmup,
            rounds=(self.rounds, self.rounds),
            counts=(self.runs, self.stream_runs),
            images=(load.image_resolution,),
        )


async def peers(
    *,
    who: PeerOptions = PeerOptions(),
    work: Work = Work(),
    load: LoadOptions = LoadOptions(),
    prompts: PromptOptions = PromptOptions(),
    store: StoreOptions = StoreOptions(),
) -> int:
    refuse_text(work.workload, prompts)
    found, reference = contestants(who)
    if prompts.tokenizer is None and who.gguf is not None:
        prompts = replace(prompts, tokenizer=str(who.gguf))
    setup = make_setup(who, work.size(load), found)
    resident = fit_at_once(who, found)
    settings = {
        **work.settings(load),
        **prompts.settings(),
        "reference": reference,
        "gguf": who.gguf.name if who.gguf is not None else None,
        "gguf_bytes": who.gguf.stat().st_size if who.gguf is not None else None,
        "slots": setup.parallel,
        "context": setup.context,
        "threads": setup.threads,
        "resident": resident,
    }

    async def make_cells(target: Target) -> tuple[PromptSource, Sequence[Cell]]:
        source = await PromptSource.of(target.client, target.model, prompts)
        return source, work.cells(source, load)

    with store.begin("peers", settings) as run:
        setup = replace(setup, logs=run.folder / "logs")
        contenders = [
            Contender.of(peer, setup, run, timeout=who.timeout, api_key=who.api_key) for peer in found
        ]
        try:
            await Turns(run, contenders, reference, work.rounds, resident, make_cells, work.limit).hold()
        finally:
            show(run)
        if not len(run.results().of(metric=["latency", "ttft"])):
            reasons = "\n".join(f"{one.peer.name}: {one.failed or 'not reached'}" for one in contenders)
            raise BenchError(f"nothing was measured:\n{reasons}")
    if failed := [one.peer.name for one in contenders if not one.alive]:
        raise BenchError(f"failed: {', '.join(failed)}")
    return 0


peers.__doc__ = f"""Compare servers in turns on one model and one workload, with ratios against one of them.

- `qwen-bench peers --gguf model.gguf --peer server --peer best=llama-server:tuned`
- `qwen-bench peers --gguf model.gguf --peer 'fair=server' --peer 'fcfs=server --scheduling-policy fcfs'
  --workload random --levels 8,64`
- `qwen-bench peers --peer a=http://127.0.0.1:8080 --peer b=http://127.0.0.1:8081 --workload chat`

Each server is started on a free port with the same slots, context and threads, and stopped at the end. Its
output is in the run's folder.

{SYNTAX}
"""


def contestants(who: PeerOptions) -> tuple[list[Peer], str]:
    """(peers, name of the reference). Raises BenchError for invalid combinations."""
    found = [parse_peer(text) for text in who.peer]
    names = [peer.name for peer in found]
    if not names:
        raise BenchError("--peer: want at least one")
    if len(set(names)) < len(names):
        raise BenchError("--peer: two have one name; give each its own as NAME=...")
    reference = who.reference or names[0]
    if reference not in names:
        raise BenchError(f"--reference {reference}: want one of {', '.join(names)}")
    if any(peer.url is None and peer.model is None for peer in found):
        if who.gguf is None:
            raise BenchError("--gguf: the servers that are started here need a model")
        if not who.gguf.is_file():
            raise BenchError(f"--gguf {who.gguf}: no such file")
    return found, reference


def make_setup(who: PeerOptions, size: tuple[int, int], found: Sequence[Peer]) -> Setup:
    """The resources of each server, the same for all. Builds llama.cpp's programs if they are needed and
    --binaries is not given."""
    binaries = who.binaries
    if binaries is None and any(peer.program == "llama-server" for peer in found):
        binaries = build_programs(["llama-server"], this_machines_flavour(), patched=False)
    tokens, most = size
    slots = who.slots or most
    return Setup(
        gguf=who.gguf or Path(),
        parallel=slots,
        context=who.context or ROOM * slots * ALLOCATION * -(-tokens // ALLOCATION),
        threads=who.threads,
        binaries=(binaries or Path()).resolve(),
        python=who.python,
        logs=Path(),  # set when the run has begun
        start_timeout=who.start_timeout,
    )


def fit_at_once(who: PeerOptions, found: Sequence[Peer]) -> bool:
    """Whether all servers run at once (--residency). By default they do, unless one of several is vLLM, which
    takes the whole GPU's memory.
    """
    if who.residency != "auto":
        return who.residency == "all"
    started = [peer for peer in found if peer.url is None]
    return len(started) < 2 or all(peer.program != "vllm" for peer in started)
