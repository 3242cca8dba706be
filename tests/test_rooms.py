"""Rules of imports: rooms depend on each other in one direction, and only one package uses the C API."""

import ast
import re
from collections.abc import Container, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qwen_serve"

PACKAGES = ("bench", "common", "convert", "llamacpp", "server")

DOORS = ("bench", "convert", "server")
"""Folders at the top with a package's page and scripts."""

C_API = {"ctypes", "llama_cpp"}
C_API_ROOM = "llamacpp/"
"""Everybody else takes typed objects from there, and exceptions for errors."""

REASONS = {
    "common/children.py": {"ctypes"},  # prctl, which Python does not have
    "common/memory.py": {"ctypes"},  # malloc_trim, neither
    "bench/gates/levels.py": {"llama_cpp"},  # only to come before numpy, or some CUDA builds crash
    "bench/gates/perplexity.py": {"llama_cpp"},  # the same
}

OTHERS = {
    "common": {"qwen_serve.convert", "qwen_serve.server", "qwen_serve.bench", "qwen_serve.llamacpp"},
    "convert": {"qwen_serve.server", "qwen_serve.bench"},
    "llamacpp": {"qwen_serve.convert", "qwen_serve.server", "qwen_serve.bench"},
    "bench/load": {"qwen_serve.bench.servers"},
    "server": {"qwen_serve.convert", "qwen_serve.bench"},
    "server/engine": {"qwen_serve.server.api", "qwen_serve.server.chat"},
    "server/engine/prefix_cache": {"qwen_serve.server.engine.speculation"},
    "server/engine/sampling": {"qwen_serve.server.engine.speculation"},
    "server/chat": {"qwen_serve.server.api"},
}
"""What a room does not know."""

LONGEST = 450
"""Lines of a file."""

LONGER = {
    "qwen_serve/server/engine/prefix_cache/cache.py",
}
"""Files that are still longer; one that is split goes from here, and none is added."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file; relative ones made absolute."""
    return {name for names in named(ast.walk(parsed(path)), path) for name in names}


def needed(path: Path, modules: Container[str], *, types: bool) -> set[str]:
    """Those of `modules` that a file imports, in functions too; with `types` also for the type checker."""
    for_types = {
        id(part)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for body in node.body
        for part in ast.walk(body)
    }
    nodes = (node for node in ast.walk(parsed(path)) if types or id(node) not in for_types)
    # of `from package import name`, the module of that name, or else the package
    found = (next((name for name in names if name in modules), None) for names in named(nodes, path))
    return {name for name in found if name is not None}


def named(nodes: Iterable[ast.AST], path: Path) -> Iterator[tuple[str, ...]]:
    """Of each imported name what it may be: a module, or something in a package."""
    package = path.relative_to(ROOT).parent.parts
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", module) for alias in node.names)


def sources(room: str) -> list[Path]:
    """A package's files. A rule that holds for none of them says nothing, so there are some."""
    return files_of(PACKAGE / room)


def files_of(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found, f"{folder} has no Python file"
    return found


def name_of(path: Path) -> str:
    """Relative to the package."""
    return path.relative_to(PACKAGE).as_posix()


def test_the_c_api_is_touched_in_its_room_alone() -> None:
    found = {}
    for path in (path for room in PACKAGES for path in sources(room)):
        name = name_of(path)
        used = {module.partition(".")[0] for module in imports(path)} & C_API
        if used and not name.startswith(C_API_ROOM):
            found[name] = used
    assert found == REASONS


@pytest.mark.parametrize("room", ["convert", "server"])
def test_a_door_s_page_names_every_module_and_no_other(room: str) -> None:
    page = (ROOT / room / "README.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`([a-z_/]+(?:/|\.py))`", table))
    folders = tuple(name for name in named if name.endswith("/"))
    there = {path.relative_to(PACKAGE / room).as_posix() for path in sources(room)}
    modules = {name for name in there if not name.endswith("__init__.py")}
    assert {name for name in modules - named if not name.startswith(folders)} == set()
    assert {name for name in named if name.endswith(".py")} - there == set()


@pytest.mark.parametrize("room", OTHERS)
def test_imports_point_one_way(room: str) -> None:
    for path in sources(room):
        for module in imports(path):
            known = {other for other in OTHERS[room] if f"{module}.".startswith(f"{other}.")}
            assert not known, f"{name_of(path)} imports {module}"


def test_a_module_has_one_name() -> None:
    """In a checkout, `import server` finds the door, which has no module: its scripts start the package's."""
    for path in (path for door in DOORS for path in files_of(ROOT / door)):
        assert path.name != "__init__.py"
        defined = {type(node) for node in ast.walk(parsed(path))} & {ast.FunctionDef, ast.ClassDef}
        assert not defined, f"{path.relative_to(ROOT)} is more than a script"
    bare = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(PACKAGES)})\b", re.MULTILINE)
    for room in (PACKAGE, ROOT / "tests", ROOT / "models", *(ROOT / door for door in DOORS)):
        for path in (path for path in files_of(room) if bare.search(path.read_text(encoding="utf-8"))):
            twice = {module for module in imports(path) if module.partition(".")[0] in PACKAGES}
            assert not twice, f"{path.relative_to(ROOT)} imports {twice} without qwen_serve."


@pytest.mark.parametrize("types", [False, True], ids=["at run time", "with imports for types"])
def test_no_modules_import_each_other_in_a_circle(types: bool) -> None:
    """The graph's nodes are modules, packages' `__init__` among them; importing a module does not count as
    importing its package."""
    modules = {}
    for path in (path for room in PACKAGES for path in sources(room)):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = path
    known = {name: needed(path, modules, types=types) for name, path in modules.items()}

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(known[name])
        while waiting:
            if (module := waiting.pop()) not in seen:
                seen.add(module)
                waiting += known[module]
        return seen

    assert {name for name in modules if name in reached(name)} == set()


def test_no_file_is_longer_than_one_can_hold_in_mind() -> None:
    files = (path for folder in (PACKAGE, ROOT / "tests") for path in files_of(folder))
    longer = {path for path in files if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST}
    assert {path.relative_to(ROOT).as_posix() for path in longer} == LONGER


def test_tests_wait_for_what_is_to_come_and_not_for_a_time() -> None:
    """`tests/waiting.py` does; a pause that is meant has its reason in the same line."""
    for path in files_of(ROOT / "tests"):
        lines = path.read_text(encoding="utf-8").splitlines()
        if not any("sleep(" in line for line in lines):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "sleep":
                passes_on = [ast.unparse(argument) for argument in node.args] == ["0"]  # a turn of the loop
                explained = "  # " in lines[(node.end_lineno or 1) - 1]
                assert passes_on or explained or path.name == "waiting.py", f"{path}:{node.lineno}"
