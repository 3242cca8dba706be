"""The command line of each program for one model, so that all of them get the same resources."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.errors import BenchError
from bench.servers.launch import ServerProcess, free_port
from bench.servers.peer import Peer

ROOT = Path(__file__).resolve().parents[2]
READY = {
    "server": "/ping",
    "llama-server": "/health",
    "llama_cpp.server": "/v1/models",
    "vllm": "/health",
    "url": "/v1/models",
}
ALLOCATION = 256
"""Cells that llama.cpp allocates at a time."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every peer gets: ``parallel`` slots and ``context`` tokens for all of them together.

    ``threads`` 0: the program's own choice; ``binaries``: the folder of llama-server; ``python``: of the
    servers written in Python.
    """

    gguf: Path
    parallel: int
    context: int
    threads: int
    binaries: Path
    python: str
    logs: Path
    start_timeout: float

    @property
    def context_each(self) -> int:
        """Tokens of context that one of `parallel` requests gets."""
        return self.context // self.parallel

    def log(self, peer: Peer) -> Path:
        """The file of a peer's output."""
        return self.logs / ("".join(c if c.isalnum() or c in "-_.+=" else "-" for c in peer.name) + ".log")


def allocated(tokens: int) -> int:
    """So many tokens of context, in the steps in which llama.cpp allocates them."""
    return -(-tokens // ALLOCATION) * ALLOCATION


def command_for(peer: Peer, setup: Setup) -> ServerProcess:
    """The peer as a process that is not yet started, on a free port. Raises BenchError: vLLM is missing."""
    if peer.url is not None:
        return ServerProcess(peer.name, [], peer.url, ready_path=READY["url"], timeout=setup.start_timeout)
    port = free_port()
    build = {
        "server": _server,
        "llama-server": _llama_server,
        "llama_cpp.server": _llama_cpp_server,
        "vllm": _vllm,
    }
    return ServerProcess(
        peer.name,
        [*build[peer.program](peer, setup), "--port", str(port), *peer.flags],
        f"http://127.0.0.1:{port}",
        ready_path=READY[peer.program],
        log=setup.log(peer),
        environment=_environment(peer, setup),
        timeout=setup.start_timeout,
    )


def resources(peer: Peer, setup: Setup) -> dict[str, int]:
    """What the peer is given, for the record; nothing is known of a server that runs already."""
    if peer.url is not None:
        return {}
    slots = 1 if peer.program == "llama_cpp.server" else setup.parallel
    return {"slots": slots, "context": slots * setup.context_each}


def _server(_: Peer, setup: Setup) -> list[str]:
    command = [setup.python, "-m", "server", "--model", str(setup.gguf)]
    command += ["--parallel", str(setup.parallel), "--ctx-size", str(setup.context)]
    return command + (["--threads", str(setup.threads)] if setup.threads else [])


def _llama_server(_: Peer, setup: Setup) -> list[str]:
    command = [str(setup.binaries / "llama-server"), "--model", str(setup.gguf)]
    command += ["--parallel", str(setup.parallel), "--ctx-size", str(setup.context)]
    # without --fit off it rehearses the load to choose what is already chosen here
    command += ["--gpu-layers", "all", "--fit", "off", "--no-ui"]
    return command + (["--threads", str(setup.threads)] if setup.threads else [])


def _llama_cpp_server(_: Peer, setup: Setup) -> list[str]:
    command = [setup.python, "-m", "llama_cpp.server", "--model", str(setup.gguf)]
    # one request at a time: its context belongs to one sequence
    command += ["--n_ctx", str(setup.context_each), "--n_gpu_layers", "-1"]
    command += ["--interrupt_requests", "false"]  # else a request that waits breaks off the one that runs
    if setup.threads:
        command += ["--n_threads", str(setup.threads), "--n_threads_batch", str(setup.threads)]
    return command


def _vllm(peer: Peer, setup: Setup) -> list[str]:
    """Its key-value cache is a share of the card, not a number of tokens: the same holds for each request."""
    beside = Path(setup.python).parent / "vllm"
    program = str(beside) if beside.is_file() else shutil.which("vllm")
    if program is None:
        raise BenchError(f"--peer {peer.name}: vllm is not installed; start it elsewhere and give its URL")
    command = [program, "serve", peer.model or str(setup.gguf), "--max-num-seqs", str(setup.parallel)]
    return [*command, "--max-model-len", str(setup.context_each)]


def _environment(peer: Peer, setup: Setup) -> Mapping[str, str]:
    if peer.program == "llama-server":
        paths = [str(setup.binaries), os.environ.get("LD_LIBRARY_PATH", "")]
        return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}
    if peer.program == "server":  # found from any working directory
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    return {}
