"""The programs that can be compared: what one --peer says, and the command line that gives each program the
same model and resources.

llama-server's flags are those of the llama.cpp inside the pinned llama-cpp-python (common/arg.cpp). Left
alone, it keeps the prompt of each slot, saves prompts to host memory (8 GiB), takes checkpoints of the
recurrent state on the host, samples there, and does not speculate.
"""

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.servers.launch import PYTHON_PATH, ServerProcess, free_port, search_path

Program = Literal["server", "llama-server", "vllm", "url"]
PROGRAMS = tuple(program for program in get_args(Program) if program != "url")
READY = {
    "server": "/ping",
    "llama-server": "/health",
    "vllm": "/health",
    "url": "/v1/models",
}
NAMED = re.compile(r"(?P<name>(?!https?:)(?:(?! -)[^=:])+)=(?P<rest>.+)", re.DOTALL)
"""A name may contain spaces; an equals sign after a flag's hyphen belongs to the flag."""
DRAFTS = re.compile(r"(mtp|dflash)-([1-9]\d?)")

NO_HOST_CACHES = ("--cache-ram", "0", "--ctx-checkpoints", "0")
PARTS: dict[str, tuple[str, ...]] = {
    "cache": (),
    "no-host-caches": NO_HOST_CACHES,
    "plain": ("--no-cache-prompt", *NO_HOST_CACHES),
    "backend-sampling": ("--backend-sampling",),
    "tuned": (*NO_HOST_CACHES, "--backend-sampling", "--ubatch-size", "2048", "--batch-size", "8192"),
    "ngram-mod": ("--spec-default",),
}

SYNTAX = """\
A peer is ``[NAME=]WHAT [FLAGS]``, where WHAT is one of

* ``server``: this repository's server (python -m qwen_serve.server)
* ``llama-server``: llama.cpp's own; ``llama-server:PART+PART`` sets it up, see below
* ``vllm[:MODEL]``: vLLM, where it is installed, on a hub id or a folder (else the GGUF)
* ``http://host:port``: one that runs already, such as SGLang

and FLAGS are passed on to the program, after everything that this command sets.

llama-server's parts, joined with ``+``:

* ``tuned``: its fastest settings on a GPU: no caches in host memory, sampling on the device, ubatches of
  2,048 and batches of 8,192 tokens; with ``mtp-N`` or ``ngram-mod`` what this repository compares itself with
* ``cache``: as it comes: prompts kept in slots and in host memory, no speculation
* ``plain``: nothing reused between requests, no speculation
* ``no-host-caches``: without the prompt cache and checkpoints in host memory
* ``backend-sampling``: samples on the device
* ``mtp-N``: drafts N tokens with the model's multi-token-prediction head
* ``dflash-N``: drafts N tokens with a block drafter, which --spec-draft-model names
* ``ngram-mod``: --spec-default: n-gram drafts of 48 to 64 tokens, shared by all requests"""


@dataclass(frozen=True, slots=True)
class Peer:
    """One competitor. ``flags`` hold what the preset means and what the user added, in that order; ``model``
    is what vLLM serves in place of the GGUF."""

    name: str
    program: Program
    flags: tuple[str, ...] = ()
    url: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """Resources of every peer: ``parallel`` slots and ``context`` tokens for all of them together.

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
        """Tokens of context for one of `parallel` requests."""
        return self.context // self.parallel


def parse_peer(text: str) -> Peer:
    """Read one --peer (`SYNTAX`). Raises BenchError that names what is wrong."""
    named = NAMED.fullmatch(text)
    rest = named["rest"] if named else text
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise BenchError(f"--peer {text}: {error}") from error
    if not words:
        raise BenchError("--peer: empty; want [NAME=]WHAT [FLAGS]")
    what, flags = words[0], tuple(words[1:])
    if what.startswith(("http://", "https://")):
        if flags:
            raise BenchError(f"--peer {text}: a running server takes no flags")
        return Peer(named["name"] if named else what, "url", url=what.rstrip("/").removesuffix("/v1"))
    name = named["name"] if named else " ".join(words)
    program, _, preset = what.partition(":")
    if program == "llama-server":
        return Peer(name, "llama-server", (*preset_flags(preset), *flags))
    if program == "vllm":
        return Peer(name, "vllm", flags, model=preset or None)
    if program not in PROGRAMS:
        raise BenchError(f"--peer {text}: want a URL or one of {', '.join(PROGRAMS)}, not {program!r}")
    if preset:
        raise BenchError(f"--peer {text}: only llama-server has presets; give {program} its flags")
    return Peer(name, "server", flags)


def preset_flags(preset: str) -> tuple[str, ...]:
    """The flags of ``a+b+c``; none for llama-server with its defaults. Raises BenchError."""
    flags: list[str] = []
    for part in filter(None, preset.split("+")):
        if match := DRAFTS.fullmatch(part):
            flags += ["--spec-type", f"draft-{match[1]}", "--spec-draft-n-max", match[2]]
        elif part in PARTS:
            flags += PARTS[part]
        else:
            known = ", ".join([*PARTS, "mtp-N", "dflash-N"])
            raise BenchError(f"--peer llama-server:{preset}: no part {part!r}; there are {known}")
    return tuple(flags)


def process_of(peer: Peer, setup: Setup) -> ServerProcess:
    """The peer as a process that is not yet started, on a free port. Raises BenchError if vLLM is missing."""
    if peer.url is not None:
        return ServerProcess(peer.name, [], peer.url, ready_path=READY["url"], timeout=setup.start_timeout)
    port = free_port()
    environment = {
        "llama-server": search_path("LD_LIBRARY_PATH", setup.binaries),
        "server": PYTHON_PATH,
    }
    log = "".join(c if c.isalnum() or c in "-_.+=" else "-" for c in peer.name)
    return ServerProcess(
        peer.name,
        [*_command(peer, setup), "--port", str(port), *peer.flags],
        f"http://127.0.0.1:{port}",
        ready_path=READY[peer.program],
        log=setup.logs / f"{log}.log",
        environment=dict(environment.get(peer.program, {})),
        timeout=setup.start_timeout,
    )


def resources(peer: Peer, setup: Setup) -> dict[str, int]:
    """The peer's settings, for the record; unknown for a server that runs already."""
    if peer.url is not None:
        return {}
    return {"slots": setup.parallel, "context": setup.parallel * setup.context_each}


def _command(peer: Peer, setup: Setup) -> list[str]:
    """The program with its model and resources."""
    model = ["--model", str(setup.gguf)]
    slots = ["--parallel", str(setup.parallel), "--ctx-size", str(setup.context)]
    slots += ["--threads", str(setup.threads)] if setup.threads else []
    if peer.program == "server":
        return [setup.python, "-m", "qwen_serve.server", *model, *slots]
    if peer.program == "llama-server":
        # without --fit off it rehearses the load to choose what is already chosen here
        chosen = ["--gpu-layers", "all", "--fit", "off", "--no-ui"]
        return [str(setup.binaries / "llama-server"), *model, *slots, *chosen]
    # vLLM's key-value cache is a share of the card, not a number of tokens: the same holds for each request
    beside = Path(setup.python).parent / "vllm"
    program = str(beside) if beside.is_file() else shutil.which("vllm")
    if program is None:
        raise BenchError(f"--peer {peer.name}: vllm is not installed; start it elsewhere and give its URL")
    sizes = ["--max-num-seqs", str(setup.parallel), "--max-model-len", str(setup.context_each)]
    return [program, "serve", peer.model or str(setup.gguf), *sizes]
