"""`python -m tests.changed`: runs the tests of files that differ from another commit (`make check`).

A file's tests are those named after it in the folder that mirrors its own, and those that import it by name,
unless these are many. If there are none, all tests of that folder run. `make test` finds what a change breaks
elsewhere.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
PACKAGES = {"models", "qwen_serve", "tests"}
ALWAYS = ("tests/test_rooms.py",)
SHARED = 12
"""What more test files than that import is everybody's: those named after it speak for it."""
ELSEWHERE = {
    "Makefile": "tests/test_packaging.py",
    "Dockerfile.cpu": "tests/test_packaging.py",
    "Dockerfile.cuda": "tests/test_packaging.py",
    ".dockerignore": "tests/test_packaging.py",
    "pyproject.toml": "tests/test_packaging.py",
    "setup.py": "tests/test_packaging.py",
    "bench": "tests/bench/test_entries.py",
    "convert": "tests/test_doors.py",
    "server": "tests/test_doors.py",
    "qwen_serve/bench/checks": "tests/server/test_conformance.py",
    "native": "tests/patches/test_queue.py",
    "quant_recipes": "tests/convert/test_recipes.py",
    "start_server.sh": "tests/server/test_scripts.py",
    "stop_server.sh": "tests/server/test_scripts.py",
}
"""Files and folders whose tests lie elsewhere than where they would mirror them."""


def changed(since: str) -> list[str]:
    """Paths that differ from the merge base with `since`, including uncommitted and new ones."""
    commands = (
        ["git", "diff", "--name-only", "--merge-base", since],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    found: set[str] = set()
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
        found.update(done.stdout.splitlines())
    return sorted(found)


def covering(path: str) -> set[str]:
    """The test files, or folders of them, for one file of the tree; empty if no test reads it."""
    file = PurePosixPath(path)
    elsewhere = {tests for name, tests in ELSEWHERE.items() if f"{path}/".startswith(f"{name}/")}
    if file.suffix == ".md":
        elsewhere.add("tests/test_docs.py")
    if elsewhere:
        return elsewhere
    if file.parts[0] == "tests":
        return _covering_a_test(file)
    room = file.parent.relative_to("qwen_serve") if file.parts[0] == "qwen_serve" else file.parent
    mirror = PurePosixPath("tests") / room
    named = {_name(test) for test in (ROOT / mirror).glob(f"test_{file.stem}*.py")}
    found = importers().get(path, set()) if file.suffix == ".py" else set()
    if named and len(found) > SHARED:
        found = set()
    return named | found or _room(mirror)


def _covering_a_test(file: PurePosixPath) -> set[str]:
    """A test file itself; for a helper of tests, the tests that use it."""
    if file.name.startswith("test_"):
        return {str(file)} if (ROOT / file).exists() else set()
    return importers().get(str(file), set()) or _room(file.parent)


def _room(mirror: PurePosixPath) -> set[str]:
    """The tests of a folder, or of the nearest parent that has tests."""
    while mirror.name not in ("tests", ""):
        found = {_name(test) for test in (ROOT / mirror).glob("test_*.py")}
        beside = mirror.with_name(f"test_{mirror.name}.py")
        if found or (ROOT / beside).exists():
            return found or {str(beside)}
        mirror = mirror.parent
    return set()


@cache
def importers() -> dict[str, set[str]]:
    """The test files that import a file by name, directly or from its package."""
    found: dict[str, set[str]] = {}
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        for module, name in _imports(test):
            if module.partition(".")[0] in PACKAGES and (source := _defined_in(module, name)):
                found.setdefault(_name(source), set()).add(_name(test))
    return found


@cache
def _imports(path: Path) -> list[tuple[str, str]]:
    """(module, name) of all imports of a file, including those in functions. The name is empty for the module
    itself."""
    package = path.relative_to(ROOT).parent.parts
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            found += [(module, alias.name) for alias in node.names]
    return found


def _defined_in(module: str, name: str) -> Path | None:
    """The file behind a name of a module: a package's is looked for where the package has it from."""
    if name and (submodule := _file(f"{module}.{name}")):
        return submodule
    file = _file(module)
    if file and name and file.name == "__init__.py":
        for source, imported in _imports(file):
            if imported == name and source != module:
                return _defined_in(source, name)
    return file


def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def chosen(paths: Iterable[str]) -> Iterator[str]:
    """The test files for these paths, without duplicates."""
    found = {test for path in paths for test in covering(path)}
    return iter(sorted(found.union(ALWAYS)))


def main() -> int:
    """Run pytest on the chosen files. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.changed", description=__doc__)
    parser.add_argument("--since", default="main", help="the commit or branch (main)")
    parser.add_argument("pytest", nargs="*", help="after --: what pytest is given beside the files")
    arguments = parser.parse_args()
    paths = changed(arguments.since)
    if not paths:
        print(f"nothing differs from {arguments.since}")
        return 0
    tests = list(chosen(paths))
    print(f"{len(paths)} files differ from {arguments.since}; their tests:", *tests, sep="\n  ", flush=True)
    code = subprocess.run([sys.executable, "-m", "pytest", *arguments.pytest, *tests], cwd=ROOT).returncode
    return 0 if code == 5 else code  # 5: all of them are slow ones


if __name__ == "__main__":
    sys.exit(main())
