"""Who imports what: the rooms of the tree keep to themselves, and two packages alone touch the C API."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PACKAGES = ("bench", "common", "convert", "llamacpp", "server")

C_API = {"ctypes", "llama_cpp"}
DOORS = ("llamacpp/", "convert/llama/")
"""Everybody else takes typed objects from there, and exceptions for errors."""

REASONS = {
    "convert/__main__.py": {"llama_cpp"},  # only to come before numpy, or some CUDA builds crash
    "bench/gates/perplexity.py": {"llama_cpp"},  # the same
    "bench/engine/sampling.py": {"llama_cpp"},  # llama.cpp's own samplers, to measure ours against
    "bench/load/vocabulary.py": {"llama_cpp"},  # the tokenizer alone, from a GGUF
}

OTHERS = {
    "common": {"qwen_serve.convert", "qwen_serve.server", "qwen_serve.bench", "qwen_serve.llamacpp"},
    "convert": {"qwen_serve.server", "qwen_serve.bench"},
    "llamacpp": {"qwen_serve.convert", "qwen_serve.server", "qwen_serve.bench"},
    "server": {"qwen_serve.convert", "qwen_serve.bench"},
    "server/engine": {"qwen_serve.server.api", "qwen_serve.server.chat"},
    "server/chat": {"qwen_serve.server.api"},
}
"""What a room does not know."""


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file; relative ones made absolute."""
    package = ("qwen_serve", *path.relative_to(ROOT).parent.parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def test_the_c_api_is_touched_behind_its_doors_alone() -> None:
    found = {}
    for path in (path for room in PACKAGES for path in sources(room)):
        name = path.relative_to(ROOT).as_posix()
        used = {module.partition(".")[0] for module in imports(path)} & C_API
        if used and not name.startswith(DOORS):
            found[name] = used
    assert found == REASONS


def test_the_architecture_page_names_every_module_of_the_server_and_no_other() -> None:
    page = (ROOT / "server" / "README.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`([a-z_/]+(?:/|\.py))`", table))
    folders = tuple(name for name in named if name.endswith("/"))
    there = {path.relative_to(ROOT / "server").as_posix() for path in sources("server")}
    modules = {name for name in there if not name.endswith("__init__.py")}
    assert {name for name in modules - named if not name.startswith(folders)} == set()
    assert {name for name in named if name.endswith(".py")} - there == set()


@pytest.mark.parametrize("room", OTHERS)
def test_imports_point_one_way(room: str) -> None:
    for path in sources(room):
        for module in imports(path):
            known = {other for other in OTHERS[room] if f"{module}.".startswith(f"{other}.")}
            assert not known, f"{path.relative_to(ROOT)} imports {module}"


def test_a_module_has_one_name() -> None:
    """In a checkout `import server` would find the same files a second time."""
    for room in (*PACKAGES, "tests", "models"):
        for path in sources(room):
            twice = {module for module in imports(path) if module.partition(".")[0] in PACKAGES}
            assert not twice, f"{path.relative_to(ROOT)} imports {twice} without qwen_serve."
