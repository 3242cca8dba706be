"""Several servers on one model and one workload, in turns, with ratios against one of them.

    python bench/peers.py --gguf models/nano-Q4_K_M.gguf --workload latency --runs 5 --out peers.json \\
        --peer server --peer llama-server:cache --peer 'mtp=llama-server:mtp-4+backend-sampling'

Each server is started on a free port with its output in a log file, and stopped in the end. The first --peer
is the reference unless --reference names another. llama-batched-bench and llama-bench give the ceiling that
the engine itself sets. llama.cpp's programs come from --binaries, or are built from the sources inside
llama-cpp-python's sdist on first use.
"""

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import environment
from bench.ceiling import PROGRAMS as CEILING_PROGRAMS
from bench.ceiling import Ceiling, measure_ceiling
from bench.contest import Contender, Supply, cells_of, compare_answers, hold
from bench.errors import BenchError
from bench.latency import parse_categories
from bench.latency_result import CATEGORIES, PROTOCOLS
from bench.launch import Peer, Setup, command_for, parse_peer
from bench.launch.peer import SYNTAX
from bench.launch.presets import HELP
from bench.llama_cpp_build import build_programs, this_machines_flavour
from bench.options import HelpFormatter, add_prompt_options, natural, positive, positives, run
from bench.peers_report import draw, tables
from bench.peers_result import (
    PeersResult,
    latency_figures,
    read_any_baseline,
    throughput_figures,
    with_ratios,
)
from bench.publish import publish

TEMPLATE_TOKENS = 64  # room for a chat template around a prompt
LENGTHS = {"random": (1024, 1024), "shared-prefix": (100, 128), "chat": (100, 128)}


async def peers(args: argparse.Namespace) -> int:
    """The verb. Exit status 1 when a peer failed, 143 when it was told to stop; what is measured is kept."""
    began = perf_counter()
    contestants = _contestants(args)
    baseline = read_any_baseline(args.baseline)
    task = asyncio.current_task()
    assert task is not None
    terminated: list[int] = []

    def terminate() -> None:
        terminated.append(signal.SIGTERM)
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as temporary:
        setup = _setup(args, contestants, Path(temporary))
        contenders = [
            Contender.of(peer, command_for(peer, setup), timeout=args.timeout, api_key=args.api_key)
            for peer in contestants
        ]
        resident = _resident(args, setup, contestants)
        head: dict[str, Any] = {
            "command": args.command,
            "url": "",
            "model": None,
            "started": datetime.now(UTC).replace(microsecond=0),
            "host": environment.host(),
            "card": environment.card("http://127.0.0.1", args.card),
            "versions": environment.versions(),
        }
        notes: list[str] = list(args.note)
        ceiling: Ceiling | None = None

        def result() -> PeersResult:
            compare_answers(contenders, args.reference)
            measured = [one.measured for one in contenders]
            figures = (
                latency_figures(measured, ceiling)
                if args.workload == "latency"
                else throughput_figures(measured, args.workload, _settings(args), ceiling, args.reference)
            )
            return PeersResult(
                **head,
                seconds=perf_counter() - began,
                notes=notes,
                workload=args.workload,
                gguf=str(args.gguf) if args.gguf else None,
                gguf_bytes=args.gguf.stat().st_size if args.gguf else None,
                reference=args.reference,
                resident=resident,
                settings=_settings(args),
                baseline=baseline,
                peers=[one.record for one in contenders],
                ceiling=ceiling,
                figures=with_ratios(figures, args.reference),
                measured=measured,
            )

        def save() -> None:
            if args.out is not None:
                result().save(args.out)

        try:
            ceiling = await _ceiling(args, setup, notes)
            tokenizer = args.tokenizer or (str(args.gguf) if args.gguf else None)
            rounds = cells_of(args, Supply(args, tokenizer), baseline)
            await hold(contenders, rounds, resident=resident, save=save)
        except asyncio.CancelledError:
            notes.append("STOPPED before the end")
            save()
            if not terminated:
                raise  # Ctrl-C
        finished = result()
    if terminated and not finished.figures:
        return 128 + signal.SIGTERM
    if not finished.figures:
        reasons = "\n".join(f"{one.peer.name}: {one.record.failed or 'not reached'}" for one in contenders)
        raise BenchError(f"nothing was measured:\n{reasons}")
    publish(finished, args, tables, draw)
    failed = [one.peer.name for one in contenders if not one.alive]
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
    return 128 + signal.SIGTERM if terminated else 1 if failed else 0


def _contestants(args: argparse.Namespace) -> list[Peer]:
    found = [parse_peer(text) for text in args.peer]
    names = [peer.name for peer in found]
    if len(set(names)) < len(names):
        raise BenchError("--peer: two have one name; give each its own as NAME=...")
    if args.reference is None:
        args.reference = names[0]
    if args.reference not in names:
        raise BenchError(f"--reference {args.reference}: want one of {', '.join(names)}")
    if any(peer.url is None for peer in found):
        if args.gguf is None:
            raise BenchError("--gguf: the servers that are started here need a model")
        if not args.gguf.is_file():
            raise BenchError(f"--gguf {args.gguf}: no such file")
    if args.workload != "latency":
        default_in, default_out = LENGTHS[args.workload]
        args.input_tokens = args.input_tokens or default_in
        args.output_tokens = args.output_tokens or default_out
    return found


def _setup(args: argparse.Namespace, contestants: Sequence[Peer], temporary: Path) -> Setup:
    needed = ["llama-server"] if any(peer.program == "llama-server" for peer in contestants) else []
    if args.gguf is not None and not args.no_ceiling:
        needed += CEILING_PROGRAMS
    binaries = args.binaries
    if needed and binaries is None:
        binaries = build_programs(needed, this_machines_flavour())
    logs = args.logs or (args.out.parent / f"{args.out.stem}-logs" if args.out else temporary)
    tokens, parallel = request_size(args)
    return Setup(
        gguf=args.gguf or Path(),
        parallel=args.parallel or parallel,
        request_tokens=tokens,
        threads=args.threads,
        binaries=(binaries or Path()).resolve(),
        python=args.python,
        logs=logs,
        start_timeout=args.start_timeout,
    )


def request_size(args: argparse.Namespace) -> tuple[int, int]:
    """(tokens of the longest request with its answer, most requests at once)."""
    if args.workload == "latency":
        return max(one.prompt_tokens + one.max_tokens for one in args.categories) + TEMPLATE_TOKENS, 1
    turn = args.input_tokens + args.output_tokens + TEMPLATE_TOKENS
    if args.workload == "shared-prefix":
        turn += args.prefix_tokens
    return turn * (args.turns if args.workload == "chat" else 1), max(args.levels) + args.spot_checks


def _settings(args: argparse.Namespace) -> dict[str, int | bool | str]:
    names = ["rounds", "warmup", "seed", "stop_at_eos"]
    if args.workload == "latency":
        names += ["protocol", "runs", "stream_runs", "endpoint"]
    else:
        names += ["requests", "waves", "input_tokens", "output_tokens"]
        names += ["prefix_tokens", "subjects"] if args.workload == "shared-prefix" else []
        names += ["turns"] if args.workload == "chat" else []
    return {name: getattr(args, name) for name in names}


def _resident(args: argparse.Namespace, setup: Setup, contestants: Sequence[Peer]) -> bool:
    """Whether all servers may run at once: as told, else when a generous estimate of them fits."""
    if args.residency != "auto":
        return bool(args.residency == "all")
    started = [peer for peer in contestants if peer.url is None]
    if not started:
        return True
    weights, state = 1.2 * args.gguf.stat().st_size, 2**30
    cells = 2 * setup.cells * 2**16 + setup.parallel * 2**27
    small = args.gguf.stat().st_size < 2**28
    need = len(started) * (weights + state + (cells / 16 if small else cells))
    free = _free_memory()
    if need > free:
        print(
            f"one server at a time: {need / 2**30:.0f} GiB for all, {free / 2**30:.0f} free", file=sys.stderr
        )
    return bool(need <= free)


def _free_memory() -> float:
    """Bytes free on the first card, else on the host."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return float(done.stdout.splitlines()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


async def _ceiling(args: argparse.Namespace, setup: Setup, notes: list[str]) -> Ceiling | None:
    if args.gguf is None or args.no_ceiling or args.workload == "chat":
        return None
    if args.workload == "latency":
        prompts = [category.prompt_tokens for category in args.categories]
        outputs = [category.max_tokens for category in args.categories]
        levels, raw = [1], list[int]()
    else:
        prompts, outputs, levels = [args.input_tokens], [args.output_tokens], args.levels
        raw = [args.prefix_tokens] if args.workload == "shared-prefix" else []
    try:
        return await measure_ceiling(
            setup.binaries,
            args.gguf,
            prompts=prompts,
            outputs=outputs,
            sequences=levels,
            threads=args.threads,
            raw_prompts=raw,
            timeout=args.timeout,
        )
    except BenchError as error:
        notes.append(f"no ceiling: {error}")
        print(f"no ceiling: {error}", file=sys.stderr)
        return None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python bench/peers.py",
        description=__doc__,
        epilog=f"{SYNTAX}\n\n{HELP}",
        formatter_class=HelpFormatter,
    )
    who = made.add_argument_group("peers")
    who.add_argument(
        "--peer", action="append", required=True, metavar="PEER", help="again for each; see below"
    )
    who.add_argument("--reference", metavar="NAME", help="whom the ratios are against (the first --peer)")
    who.add_argument("--gguf", type=Path, help="the model that every server is started on")
    who.add_argument("--binaries", type=Path, help="folder of llama-server, llama-bench, llama-batched-bench")
    who.add_argument("--python", default=sys.executable, help="runs the servers written in Python")
    who.add_argument(
        "--threads", type=natural, default=0, help="CPU threads of each server; 0: its own choice"
    )
    who.add_argument("--parallel", type=positive, help="sequences of each server (the highest level)")
    who.add_argument("--start-timeout", type=float, default=300.0, help="seconds until a server must answer")
    who.add_argument(
        "--residency",
        choices=("auto", "all", "one"),
        default="auto",
        help="all servers at once, visited in turns; or one after another; auto: all if they fit in memory",
    )
    who.add_argument("--logs", type=Path, help="folder of the servers' logs (beside --out)")
    who.add_argument("--no-ceiling", action="store_true", help="leave llama-bench and -batched-bench out")
    work = made.add_argument_group("workload")
    work.add_argument("--workload", choices=("latency", *LENGTHS), default="latency")
    work.add_argument("--rounds", type=positive, default=1, help="times that all peers are visited")
    work.add_argument("--warmup", type=natural, default=2, help="untimed requests of each peer in each part")
    work.add_argument("--text", type=Path, help="cut the prompts from this text, the same ones for each peer")
    add_prompt_options(work)
    timed = made.add_argument_group("latency")
    timed.add_argument("--protocol", choices=("both", *PROTOCOLS), default="both")
    timed.add_argument("--categories", type=parse_categories, default=",".join(CATEGORIES))
    timed.add_argument("--runs", type=positive, default=50, help="timed requests per category and protocol")
    timed.add_argument("--stream-runs", type=natural, default=0, help="streamed ones besides, in each round")
    timed.add_argument("--endpoint", default="/v1/completions", help="every server has this one")
    timed.add_argument(
        "--baseline",
        default="none",
        help="for the score: as of bench.latency, or a result file of this command",
    )
    many = made.add_argument_group("throughput")
    many.add_argument("--levels", type=positives, default=[1, 8, 64], help="concurrent requests")
    many.add_argument("--requests", type=positive, default=64, help="a level and round")
    many.add_argument(
        "--waves", type=natural, default=0, help="not 0: this many times the level, at least 4, are requested"
    )
    many.add_argument("--input-tokens", type=positive, help="a prompt, question or turn (1024; else 100)")
    many.add_argument("--output-tokens", type=positive, help="an answer (1024; else 128)")
    many.add_argument(
        "--prefix-tokens", type=positive, default=2000, help="shared-prefix: a subject's prefix"
    )
    many.add_argument("--subjects", type=positive, default=4, help="shared-prefix: different prefixes")
    many.add_argument("--turns", type=positive, default=4, help="chat: turns of a conversation")
    many.add_argument("--spot-checks", type=natural, default=0, help="sums asked in each level")
    about = made.add_argument_group("requests and output")
    about.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take")
    about.add_argument("--api-key", help="sent as a bearer token")
    about.add_argument("--card", help="the graphics card, for the record (asked otherwise)")
    about.add_argument("--note", action="append", default=[], help="kept in the results file")
    about.add_argument("--out", type=Path, help="results file (JSON); the picture goes beside it as .png")
    about.add_argument("--plot", type=Path, help="the picture's own file (.png, .svg or .pdf)")
    return made


if __name__ == "__main__":
    sys.exit(run(parser(), peers))
