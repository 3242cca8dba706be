"""qwen-serve's version, data files and cache folder."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CACHE_VARIABLE = "QWEN_SERVE_CACHE"
WHEELS_VARIABLE = "QWEN_SERVE_WHEELS"


def own_version() -> str:
    """qwen-serve's version; "0" in a checkout that was never installed."""
    try:
        return version("qwen-serve")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"


def llama_version() -> str:
    """llama-cpp-python's version."""
    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return "not installed"


def data_folder(name: str) -> Path:
    """Folder of data files such as `patches`: inside the installed package, or beside it in a checkout."""
    packaged = Path(__file__).parent / name
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / name


def cache_folder() -> Path:
    """The folder of builds and converted models: QWEN_SERVE_CACHE, else `qwen-serve` in the user's cache."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qwen-serve"
