"""The command line of each program for one GGUF, so that all of them get the same resources."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.launch.peer import Peer
from bench.launch.process import ServerProcess, free_port

ROOT = Path(__file__).resolve().parents[2]
READY = {"server": "/ping", "llama-server": "/health", "llama_cpp.server": "/v1/models", "url": "/v1/models"}
CACHE_SHARE = 2
"""Our server keeps cached prompts in the context itself, llama-server in host memory beside it: ours gets
this many times the cells that the running requests need."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every peer gets. ``request_tokens``: the longest request, prompt and answer; ``threads`` 0: the
    program's own choice; ``binaries``: the folder of llama-server; ``python``: of the Python servers."""

    gguf: Path
    parallel: int
    request_tokens: int
    threads: int
    binaries: Path
    python: str
    logs: Path
    start_timeout: float

    @property
    def cells(self) -> int:
        """Tokens of context for all requests at once, in the steps in which llama.cpp allocates them."""
        return self.parallel * -(-self.request_tokens // 256) * 256

    def log(self, peer: Peer) -> Path:
        """The file of a peer's output."""
        return self.logs / ("".join(c if c.isalnum() or c in "-_.+=" else "-" for c in peer.name) + ".log")


def command_for(peer: Peer, setup: Setup) -> ServerProcess:
    """The peer as a process that is not yet started, on a free port."""
    if peer.url is not None:
        return ServerProcess(peer.name, [], peer.url, ready_path=READY["url"], timeout=setup.start_timeout)
    port = free_port()
    build = {"server": _server, "llama-server": _llama_server, "llama_cpp.server": _llama_cpp_server}
    return ServerProcess(
        peer.name,
        [*build[peer.program](setup, port), *peer.flags],
        f"http://127.0.0.1:{port}",
        ready_path=READY[peer.program],
        log=setup.log(peer),
        environment=_environment(peer, setup),
        timeout=setup.start_timeout,
    )


def _server(setup: Setup, port: int) -> list[str]:
    command = [setup.python, "-m", "server", "--model", str(setup.gguf), "--port", str(port)]
    command += ["--parallel", str(setup.parallel), "--ctx-size", str(CACHE_SHARE * setup.cells)]
    if setup.threads:
        command += ["--threads", str(setup.threads)]
    return command


def _llama_server(setup: Setup, port: int) -> list[str]:
    command = [str(setup.binaries / "llama-server"), "--model", str(setup.gguf), "--port", str(port)]
    command += ["--parallel", str(setup.parallel), "--ctx-size", str(setup.cells)]
    # without --fit off it rehearses the load to choose what is already chosen here
    command += ["--gpu-layers", "all", "--fit", "off", "--no-ui"]
    if setup.threads:
        command += ["--threads", str(setup.threads)]
    return command


def _llama_cpp_server(setup: Setup, port: int) -> list[str]:
    command = [setup.python, "-m", "llama_cpp.server", "--model", str(setup.gguf), "--port", str(port)]
    # one request at a time: its context belongs to one sequence
    command += ["--n_ctx", str(setup.cells // setup.parallel), "--n_gpu_layers", "-1"]
    command += ["--interrupt_requests", "false"]  # else a request that waits breaks off the one that runs
    if setup.threads:
        command += ["--n_threads", str(setup.threads), "--n_threads_batch", str(setup.threads)]
    return command


def _environment(peer: Peer, setup: Setup) -> Mapping[str, str]:
    if peer.program == "llama-server":
        paths = [str(setup.binaries), os.environ.get("LD_LIBRARY_PATH", "")]
        return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}
    if peer.program == "server":  # found from any working directory
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    return {}
