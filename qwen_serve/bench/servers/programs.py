"""The programs that can be compared: parses --peer, and makes the command line that gives each program the
same model and resources.

llama-server's flags are those of the pinned llama-cpp-python's llama.cpp (common/arg.cpp). By default it
keeps the prompt of each slot, saves prompts to host memory (8 GiB), keeps checkpoints of the recurrent state
on the host, samples on the host, and does not speculate.
"""

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

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
"""NAME=WHAT. A name may contain spaces. An equals sign after a flag's hyphen belongs to the flag."""
RUNNING = re.compile("https?://")
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
A peer is ``[NAME=]WHAT [FLAGS]``. WHAT is one of

* ``server``: qwen-serve (python -m qwen_serve.server)
* ``llama-server``: llama.cpp's server; ``llama-server:PART+PART`` adds the parts below to its defaults
* ``vllm[:MODEL]``: vLLM, if it is installed. MODEL is a hub id or a folder (default: the GGUF)
* ``http://host:port [FIELDS] [beside FIELDS]``: a running server, such as SGLang. FIELDS, a JSON object such
  as ``{"temperature": 0.7, "top_k": 20}``, is added to its requests, so that one server is measured with
  several ways to sample. ``beside``: one more client, which is not measured, sends requests with other fields

FLAGS are passed to the program, after the flags that this command sets.

Parts of llama-server:

* ``tuned``: its fastest settings on a GPU: no caches in host memory, sampling on the device, ubatches of
  2,048 and batches of 8,192 tokens. The published comparisons use it, with ``mtp-N`` or ``ngram-mod``
* ``cache``: the defaults: prompts cached in slots and in host memory, no speculation
* ``plain``: no prompt cache, no speculation
* ``no-host-caches``: no prompt cache and no checkpoints in host memory
* ``backend-sampling``: sampling on the device
* ``mtp-N``: drafts of N tokens from the model's MTP head
* ``dflash-N``: drafts of N tokens from a block drafter, given with --spec-draft-model
* ``ngram-mod``: --spec-default: n-gram drafts of 48 to 64 tokens, shared by all requests"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare. ``flags``: the preset's, then the user's; ``model``: what vLLM serves instead of
    the GGUF; ``fields``: what requests have more; ``beside``: the fields of a client that is not measured."""

    name: str
    program: Program
    flags: tuple[str, ...] = ()
    url: str | None = None
    model: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """Resources of each peer: ``parallel`` slots, and ``context`` tokens for all slots together.

    ``threads`` 0: the program's default; ``binaries``: folder of llama-server; ``python``: interpreter for
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
        """Tokens of context for each slot."""
        return self.context // self.parallel


def parse_peer(text: str) -> Peer:
    """Parse a value of --peer (`SYNTAX`). Raises BenchError, which says what is wrong."""
    named = NAMED.fullmatch(text)
    rest = named["rest"] if named else text
    if RUNNING.match(rest):
        url, _, more = rest.partition(" ")
        fields, beside = read_fields(text, more)
        url = url.rstrip("/").removesuffix("/v1")
        return Peer(named["name"] if named else rest, "url", url=url, fields=fields, beside=beside)
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise BenchError(f"--peer {text}: {error}") from error
    if not words:
        raise BenchError("--peer: empty; want [NAME=]WHAT [FLAGS]")
    what, flags = words[0], tuple(words[1:])
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


def read_fields(peer: str, text: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(fields of the measured requests, those of the client beside them or None). Raises BenchError."""
    fields, word, beside = re.fullmatch(r"\s*(.*?)\s*(?:(beside)\s+(.*))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        found = [json.loads(one) if one else {} for one in (fields, beside)]
    except ValueError:
        found = [None]
    if not all(isinstance(one, dict) for one in found):
        raise BenchError(
            f"--peer {peer}: a running server takes no flags, only JSON objects: [FIELDS] [beside FIELDS]"
        )
    return found[0], found[1] if word else None


def preset_flags(preset: str) -> tuple[str, ...]:
    """The flags of a preset ``a+b+c``; none for the empty preset. Raises BenchError for an unknown part."""
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
    """The peer's process, on a free port, not yet started. Raises BenchError if vLLM is missing."""
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
    """The peer's settings, for the record; empty for a server that runs already."""
    if peer.url is not None:
        return {}
    return {"slots": setup.parallel, "context": setup.parallel * setup.context_each}


def _command(peer: Peer, setup: Setup) -> list[str]:
    """The peer's command line with model and resources."""
    model = ["--model", str(setup.gguf)]
    slots = ["--parallel", str(setup.parallel), "--ctx-size", str(setup.context)]
    slots += ["--threads", str(setup.threads)] if setup.threads else []
    if peer.program == "server":
        return [setup.python, "-m", "qwen_serve.server", *model, *slots]
    if peer.program == "llama-server":
        # by default llama-server loads the model twice, to fit settings that are given here
        chosen = ["--gpu-layers", "all", "--fit", "off", "--no-ui"]
        return [str(setup.binaries / "llama-server"), *model, *slots, *chosen]
    # vLLM sizes its KV cache by the GPU's memory, so only the context of a sequence is set
    beside = Path(setup.python).parent / "vllm"
    program = str(beside) if beside.is_file() else shutil.which("vllm")
    if program is None:
        raise BenchError(f"--peer {peer.name}: vllm is not installed; start it elsewhere and give its URL")
    sizes = ["--max-num-seqs", str(setup.parallel), "--max-model-len", str(setup.context_each)]
    return [program, "serve", peer.model or str(setup.gguf), *sizes]
