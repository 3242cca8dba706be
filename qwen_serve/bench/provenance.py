"""The conditions of a run: the machine, the GPU, versions, and the server's description of itself."""

import os
import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.client import Client

PACKAGES = ("qwen-serve", "llama-cpp-python", "vllm", "aiohttp", "lm-eval")
LOCAL = {"127.0.0.1", "localhost", "::1"}


def host() -> dict[str, str]:
    """System, processor, cores and memory of this machine, which runs the client."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
    }


def card() -> tuple[str | None, str | None]:
    """(name and memory, driver) of this machine's GPUs, from nvidia-smi; (None, None) without GPUs."""
    found = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if found is None:
        return None, None
    rows = [line.split(", ") for line in found.splitlines()]
    return "; ".join(", ".join(row[:2]) for row in rows), rows[0][-1]


def is_local(url: str) -> bool:
    """Whether the server at ``url`` runs on this machine, and so uses its GPU."""
    return urlsplit(url).hostname in LOCAL


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that matter for a measurement."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def commit() -> str | None:
    """This checkout's commit, with ``-dirty`` if it has changes; None outside of a checkout."""
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")


async def about_server(client: Client) -> dict[str, str]:
    """The server's URL, Server header and model, and its build if /props or /version reports one."""
    about = {"url": client.url}
    for path, keys in (("/v1/models", ()), ("/version", ("version",)), ("/props", ("build_info",))):
        try:
            reply = await client.request("GET", path)
            answer = reply.json() if reply.status == 200 else {}
        except BenchError:
            continue
        if "server" in reply.headers:
            about["server"] = reply.headers["server"]
        if path == "/v1/models" and answer.get("data"):
            about["model"] = str(answer["data"][0].get("id"))
        about.update({key: str(answer[key]) for key in keys if key in answer})
    return about


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None
