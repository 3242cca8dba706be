"""Which qwen-serve this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The installed package's version."""
    try:
        return version("qwen-serve")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"


def llama_version() -> str:
    """The version of llama-cpp-python, without importing it."""
    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return "not installed"
