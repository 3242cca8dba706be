"""What one --peer says: which program with which settings, or whose URL."""

import re
import shlex
from dataclasses import dataclass
from typing import Literal, get_args

from bench.errors import BenchError
from bench.servers.presets import preset_flags

Program = Literal["server", "llama-server", "llama_cpp.server", "vllm", "url"]
PROGRAMS = tuple(program for program in get_args(Program) if program != "url")
NAMED = re.compile(r"(?P<name>[\w.+-]+)=(?P<rest>.+)", re.DOTALL)

SYNTAX = """\
A peer is ``[NAME=]WHAT [FLAGS]``, where WHAT is one of

* ``server``: this repository's server (python -m server)
* ``llama-server``: llama.cpp's own; ``llama-server:PART+PART`` sets it up, see below
* ``llama_cpp.server``: the server inside llama-cpp-python
* ``vllm[:MODEL]``: vLLM, where it is installed, on a hub id or a folder (else the GGUF)
* ``http://host:port``: one that runs already, such as SGLang

and FLAGS are passed on to the program, after everything that this command sets."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One competitor. ``flags`` hold what the preset means and what the user added, in that order; ``model``
    is what vLLM serves in place of the GGUF."""

    name: str
    program: Program
    flags: tuple[str, ...] = ()
    url: str | None = None
    model: str | None = None


def parse_peer(text: str) -> Peer:
    """Read one --peer (`SYNTAX`). Raises BenchError that names what is wrong."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BenchError(f"--peer {text}: {error}") from error
    if not words:
        raise BenchError("--peer: empty; want [NAME=]WHAT [FLAGS]")
    named = NAMED.fullmatch(words[0])
    what, flags = (named["rest"] if named else words[0]), tuple(words[1:])
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
    if program == "server" and not preset:
        return Peer(name, "server", flags)
    if program == "llama_cpp.server" and not preset:
        return Peer(name, "llama_cpp.server", flags)
    if program in PROGRAMS:
        raise BenchError(f"--peer {text}: only llama-server has presets; give {program} its flags")
    raise BenchError(f"--peer {text}: want a URL or one of {', '.join(PROGRAMS)}, not {program!r}")
