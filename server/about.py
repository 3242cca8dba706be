"""Which qwen-serve this is, what it brings, and where it keeps what it makes."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CACHE_VARIABLE = "QWEN_SERVE_CACHE"


def own_version() -> str:
    """Of qwen-serve; "0" in a checkout that was never installed."""
    try:
        return version("qwen-serve")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"


def llama_version() -> str:
    """Of llama-cpp-python."""
    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return "not installed"


def data_folder(name: str) -> Path:
    """Files that are no code, such as `patches`: inside the installed package, in a checkout beside it."""
    packaged = Path(__file__).parent / name
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[1] / name


def cache_folder() -> Path:
    """Where builds and converted models are kept: QWEN_SERVE_CACHE, else `qwen-serve` in the user's cache."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qwen-serve"
