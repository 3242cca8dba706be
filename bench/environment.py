"""Where and with what a result was made: this machine, the card, versions, the server's name for itself."""

import os
import platform
import shutil
import subprocess
from argparse import Namespace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.errors import BenchError
from bench.load.client import Client

PACKAGES = ("qwen-serve", "llama-cpp-python", "aiohttp", "lm-eval")


async def header(args: Namespace, client: Client, model: str | None) -> dict[str, Any]:
    """The fields that every result file begins with, except ``kind`` and ``seconds``."""
    return {
        "command": args.command,
        "url": args.url,
        "model": model,
        "started": datetime.now(UTC).replace(microsecond=0),
        "host": host(),
        "card": card(args.url, args.card),
        "versions": versions(),
        "server": await server(client),
    }


def host() -> dict[str, str]:
    """The client's machine: system, processor, cores and memory."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{_memory_bytes() / 2**30:.0f} GiB",
    }


def card(url: str, named: str | None) -> str | None:
    """The graphics card behind ``url``: as the user ``named`` it; else nvidia-smi's, for a local server."""
    if named is not None:
        return named
    if urlsplit(url).hostname not in {"127.0.0.1", "localhost", "::1"}:
        return None
    return _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def versions() -> dict[str, str]:
    """Python, the packages that matter, and the commit of this checkout."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    if commit is not None:
        found["commit"] = commit
    return found


async def server(client: Client) -> dict[str, str]:
    """How the server names itself: its Server header, and the build where /props or /version tell it."""
    about: dict[str, str] = {}
    for path, keys in (("/v1/models", ()), ("/version", ("version",)), ("/props", ("build_info",))):
        try:
            reply = await client.request("GET", path)
            answer = reply.json() if reply.status == 200 else {}
        except BenchError:
            continue
        if "server" in reply.headers:
            about["server"] = reply.headers["server"]
        about.update({key: str(answer[key]) for key in keys if key in answer})
    return about


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip().replace("\n", "; ") or None if done.returncode == 0 else None
