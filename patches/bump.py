"""Moves the patches to another release of llama-cpp-python (moving-the-pin.md).

    make bump VERSION=0.3.37                   or python patches/bump.py 0.3.37 [--sdist FILE] [--skip-build]
    make bump VERSION=0.3.37 ARGS=--survey     counts conflicts, in half a minute
    make bump VERSION=0.3.37 ARGS=--accept     writes the moved patches and the pin into this tree

Both releases' llama.cpp, the pinned one with the queue on top, become commits of one git repository, and
each patch is cherry-picked onto the new release, topic by topic: a three-way merge. A conflict is told with
its files, ends the program (status 2), and is solved by hand; the next call goes on. What git finds empty
upstream has. Then libllama is built for the CPU, stock and patched with `native/`, and their logits are
compared; the checks of what Python leans on run with it. Where there is nvcc, the kernels of `native/` are
compiled. `report.md` in the folder of the version has all of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bump_native import Moved
from bump_report import report
from bump_sources import PACKAGE, BumpError, fetched, run, unpacked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SWITCHES = "switches"
GIT = ["git", "-c", "user.name=bump", "-c", "user.email=bump@localhost", "-c", "core.editor=true"]
CMAKE = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_CUDA=OFF",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "EXAMPLES", "TOOLS", "SERVER", "APP")),
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
]
GONE = {"upstream has it", "dropped"}
DONE = {"merged", "by hand", "as solved before"} | GONE
CHECKS = "qwen_serve.llamacpp.abi_checks_model"
"""The module that says whether a llama.cpp is as Python expects it."""


class Bump:
    """The folder of one move: the repository, what is known of each patch, the report."""

    def __init__(self, version: str, pinned: str, work: Path, survey: bool) -> None:
        self.version, self.pinned, self.survey = version, pinned, survey
        self.work = work / (f"{version}-survey" if survey else version)
        self.shared = work
        self.repository = self.work / "llama.cpp"
        self._file = self.work / "state.json"
        self.state: dict[str, Any] = {"patches": {}, "steps": {}}
        if self._file.is_file():
            self.state = json.loads(self._file.read_text(encoding="utf-8"))

    def save(self) -> None:
        """Writes down what is known, and the report."""
        self._file.write_text(json.dumps(self.state, indent=1) + "\n", encoding="utf-8")
        (self.work / "report.md").write_text(self.report(), encoding="utf-8")

    def report(self) -> str:
        """In Markdown."""
        return report(self.state, f"{PACKAGE} {self.pinned} -> {self.version}")

    def git(self, *arguments: str | Path, check: bool = True) -> str:
        """Output of git in the repository."""
        command = [*GIT, *map(str, arguments)]
        done = subprocess.run(command, cwd=self.repository, capture_output=True, text=True, check=False)
        if check and done.returncode != 0:
            raise BumpError(f"git {' '.join(map(str, arguments))}: {done.stderr or done.stdout}")
        return done.stdout

    def open(self, sdist: Path | None, base: Path | None) -> None:
        """Makes the repository: tags `pinned` and `new`, branches `queue` and `moved`."""
        if (self.repository / ".git").is_dir() and self.state["steps"].get("repository"):
            return
        shutil.rmtree(self.repository, ignore_errors=True)
        self.repository.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=queue")
        self.git("config", "gc.auto", "0")
        self.git("config", "merge.conflictStyle", "diff3")
        # what was solved once, for another version, is remembered; a survey counts it all the same
        self.git("config", "rerere.enabled", str(not self.survey).lower())
        self.git("config", "rerere.autoupdate", "true")
        (self.shared / "rr-cache").mkdir(exist_ok=True)
        (self.repository / ".git" / "rr-cache").symlink_to((self.shared / "rr-cache").resolve())
        started = time.time()
        for version, tag, archive in ((self.pinned, "pinned", base), (self.version, "new", sdist)):
            package = unpacked(archive or fetched(version, self.shared), self.work / tag)
            if self.git("ls-files"):
                self.git("rm", "-rq", ".")
            sources = package / "vendor" / "llama.cpp"
            shutil.copytree(sources, self.repository, dirs_exist_ok=True, ignore=not_git, symlinks=True)
            self.git("add", "--all", "--force", ".")
            self.git("commit", "--quiet", "--allow-empty", "-m", f"llama.cpp of {PACKAGE} {version}")
            self.git("tag", tag)
            if tag == "pinned":
                patches = [*queue(), HERE / f"{SWITCHES}.patch"]
                self.state["queue"] = [patch.stem for patch in patches]
                for patch in patches:
                    self.git("am", "--quiet", "--keep-cr", patch)
                self.git("checkout", "--quiet", "-b", "moved", "pinned")
        self.step("repository", "made", started)

    def step(self, name: str, outcome: str, started: float) -> None:
        """One step is done: its outcome and seconds."""
        self.state["steps"][name] = {"outcome": outcome, "seconds": round(time.time() - started)}
        self.save()

    def move(self) -> None:
        """Cherry-picks what is left of the queue. Raises BumpError at a conflict; a later call goes on.

        No conflict stops a survey: the patch's side is taken, to see how many there are.
        """
        names = self.state["queue"]  # as it was when the repository was made
        commits = self.git("rev-list", "--reverse", "pinned..queue").split()
        for name, commit in zip(names, commits, strict=True):
            known = self.state["patches"].setdefault(name, {"outcome": "", "conflicts": {}, "seconds": 0})
            if known["outcome"]:
                continue
            if known["conflicts"] and not self._picking():  # committed or skipped by hand
                known["seconds"] += round(time.time() - known.pop("since"))
                kept = self.subject("HEAD") == self.subject(commit)
                known["outcome"] = "by hand" if kept else "dropped"
            elif not self._picking():
                self._pick(name, commit)
            if self._picking():
                self._settle(name, commit, known)
            if not known["outcome"]:
                known["outcome"] = "by hand" if known["conflicts"] else "merged"
            after = self.numstat("HEAD") if known["outcome"] not in GONE else [0, 0]
            known["lines"] = [self.numstat(commit), after]
            self.save()

    def _picking(self) -> bool:
        return (self.repository / ".git" / "CHERRY_PICK_HEAD").exists()

    def _pick(self, name: str, commit: str) -> None:
        """Raises BumpError where git does not begin, or would leave an edit out."""
        if left := self.git("status", "--porcelain", "--untracked-files=no"):
            raise BumpError(
                f"{name} waits: {self.repository} has edits that belong to no patch:\n{left}"
                "`git commit --amend` takes them into the patch before, `git checkout FILE` throws them away."
            )
        try:
            self.git("cherry-pick", commit)
        except BumpError:
            if not self._picking():
                raise

    def _take_ours(self, commit: str) -> None:
        """The patch's side of each conflict, whether or not that compiles: later patches find their lines."""
        self.git("cherry-pick", "--abort")
        self.git("cherry-pick", "--strategy-option=theirs", commit, check=False)
        if self._picking():  # files that only one side has
            for path in self.git("diff", "--name-only", "--diff-filter=U").split():
                if subprocess.run(
                    ["git", "cat-file", "-e", f"{commit}:{path}"], cwd=self.repository, check=False
                ).returncode:
                    self.git("rm", "-q", path)
                else:
                    self.git("checkout", commit, "--", path)
            self.git("add", "--update")
            self.git("cherry-pick", "--continue")

    def _settle(self, name: str, commit: str, known: dict[str, Any]) -> None:
        """A cherry-pick that git left to us: empty, solved, or a conflict that it raises."""
        open_files = self.git("diff", "--name-only", "--diff-filter=U").split()
        marked = [path for path in self._touched() if conflicts_in(self.repository / path)]
        if open_files or marked:
            found = {path: conflicts_in(self.repository / path) or 1 for path in {*open_files, *marked}}
            if not known["conflicts"]:
                known["conflicts"], known["since"] = found, time.time()
                self.save()
            if self.survey:
                self._take_ours(commit)
                del known["since"]
                known["outcome"] = "conflict"
                return
            told = "\n".join(f"    {path}: {n} hunk{'s' * (n > 1)}" for path, n in sorted(found.items()))
            raise BumpError(
                f"{name} conflicts with llama.cpp of {PACKAGE} {self.version}:\n{told}\n"
                f"Solve them in {self.repository}, `git add` the files, and run this again."
            )
        if "since" in known:
            known["seconds"] += round(time.time() - known.pop("since"))
        self.git("add", "--update")  # files that merged and had to be edited, too
        if self.git("diff", "--cached", "--name-only"):
            self.git("cherry-pick", "--continue")
            if not known["conflicts"]:  # rerere knew
                known["outcome"] = "as solved before"
        else:
            self.git("cherry-pick", "--skip")
            known["outcome"] = "upstream has it"

    def _touched(self) -> list[str]:
        return self.git("show", "--name-only", "--format=", "CHERRY_PICK_HEAD").split()

    def subject(self, commit: str) -> str:
        """Its title."""
        return self.git("log", "-1", "--format=%s", commit)

    def numstat(self, commit: str) -> list[int]:
        """Lines that a commit adds and removes."""
        rows = [line.split("\t") for line in self.git("show", "--numstat", "--format=", commit).splitlines()]
        return [sum(int(row[i]) for row in rows if row[i].isdigit()) for i in (0, 1)]

    def export(self) -> Path:
        """The moved queue as files."""
        target = self.work / "patches"
        shutil.rmtree(target, ignore_errors=True)
        (target / "llama.cpp").mkdir(parents=True)
        kept = [name for name, known in self.state["patches"].items() if known["outcome"] not in GONE]
        for name, commit in zip(kept, self.git("rev-list", "--reverse", "new..moved").split(), strict=True):
            path = target if name == SWITCHES else target / "llama.cpp"
            (path / f"{name}.patch").write_text(self.format(commit), encoding="utf-8")
        return target

    def format(self, commit: str) -> str:
        """A commit as a file of the queue: without blob ids and statistics, which say nothing here."""
        options = ["--zero-commit", "--no-signature", "--no-stat", "--no-numbered", "--stdout", "-1"]
        head, separator, body = self.git("format-patch", *options, commit).partition("\ndiff --git ")
        head = re.sub(r"\n---\n\s*$", "\n", head).rstrip("\n")
        return f"{head}\n{separator}" + re.sub(r"(?m)^index [0-9a-f]+\.\.[0-9a-f]+( \d+)?\n", "", body)

    def build(self) -> None:
        """libllama for the CPU, stock and moved, each in its folder; and what else is in native/."""
        switches = self.state["patches"][SWITCHES]["outcome"] not in GONE
        for name, commit in (("stock", "new"), ("moved", "moved~1" if switches else "moved")):
            started, folder = time.time(), self.work / f"build-{name}"
            sources = self.work / f"sources-{name}"
            if not sources.is_dir():
                self.git("worktree", "add", "--quiet", "--detach", sources.resolve(), commit)
            self.git(
                "-C",
                sources.resolve(),
                "checkout",
                "--quiet",
                "--detach",
                self.git("rev-parse", commit).strip(),
            )
            log = self.work / f"build-{name}.log"
            jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
            with log.open("w") as output:
                ours = [f"-DCMAKE_PROJECT_INCLUDE={HERE / 'native.cmake'}"] if name == "moved" else []
                run(output, "cmake", "-S", sources, "-B", folder, *CMAKE, *ours)
                run(output, "cmake", "--build", folder, "-j", jobs, "--target", "llama")
            self.step(f"build of {name} llama.cpp for the CPU", "built", started)
        self.native()

    def native(self) -> None:
        """Our own sources, which never show a conflict, on the new release: libllama's were built with it,
        CUDA's are compiled, and llama.cpp's masks are compared."""
        moved = Moved(self.work / "sources-moved", self.work / "build-moved" / "bin", self.work)
        for name, step in (("test-kv-mask", moved.masks), ("kernels of native/", moved.kernels)):
            started = time.time()
            self.step(name, step(), started)

    def environment(self, name: str) -> dict[str, str]:
        """For Python with the new release's bindings and a library that was built here."""
        library = str((self.work / f"build-{name}" / "bin").resolve())
        (package,) = (self.work / "new").glob("*/llama_cpp")
        path = os.pathsep.join([str(package.parent.resolve()), str(ROOT)])
        return {**os.environ, "PYTHONPATH": path, "LLAMA_CPP_LIB_PATH": library, "LD_LIBRARY_PATH": library}

    def compare(self, model: Path) -> None:
        """Logits of stock and moved over scripts of mixed batches (tests/patches/rows.py)."""
        import numpy as np

        sys.path.insert(0, str(ROOT))
        from tests.patches.rows import RUNS

        for options, bound in RUNS:
            started, name, rows = time.time(), f"logits, {options}", {}
            for build in ("stock", "moved"):
                out = self.work / f"rows-{build}.npz"
                command = [sys.executable, ROOT / "tests/patches/rows.py", "--model", model, "--out", out]
                done = subprocess.run(
                    [*map(str, command), *options.split()],
                    env=self.environment(build),
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode != 0:
                    self.step(name, f"FAILED ({build}): {last_line(done.stderr)}", started)
                    break
                with np.load(out) as file:
                    rows[build] = file["rows"]
            else:
                far = float(np.abs(rows["stock"] - rows["moved"]).max() / rows["stock"].std())
                said = f"{len(rows['stock'])} rows, largest difference {far:.1e} standard deviations"
                self.step(name, said if far < bound else f"FAILED, bound {bound}: {said}", started)

    def check(self) -> None:
        """tests/patches on the moved queue, and what Python leans on with the moved library."""
        started = time.time()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:xdist",
            "-m",
            "not reference",
            "tests/patches",
        ]
        environment = {**os.environ, "PATCH_QUEUE": str((self.work / "patches" / "llama.cpp").resolve())}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        outcome = last_line(done.stdout)
        self.step("tests/patches", outcome if done.returncode == 0 else f"FAILED: {outcome}", started)
        if (self.work / "build-moved" / "bin").is_dir():
            started = time.time()
            command = [sys.executable, "-m", CHECKS, str(nano(self.work).resolve())]
            done = subprocess.run(
                command, cwd=ROOT, env=self.environment("moved"), capture_output=True, text=True, check=False
            )
            self.state["inside"] = (done.stdout or done.stderr).strip().splitlines()
            self.step("what Python leans on", "as expected" if done.returncode == 0 else "FAILED", started)

    def accept(self) -> None:
        """Writes patches and pin into the tree."""
        moved = self.export()
        for patch in queue():
            patch.unlink()
        shutil.copytree(moved / "llama.cpp", HERE / "llama.cpp", dirs_exist_ok=True)
        if (moved / f"{SWITCHES}.patch").is_file():
            shutil.copy(moved / f"{SWITCHES}.patch", HERE)
        for name in ("pyproject.toml", "README.md", ".github/ISSUE_TEMPLATE/bug.yml"):
            path = ROOT / name
            if path.is_file():
                path.write_text(
                    path.read_text(encoding="utf-8").replace(self.pinned, self.version), encoding="utf-8"
                )


def queue() -> list[Path]:
    """The patches in their order."""
    return sorted((HERE / "llama.cpp").glob("*.patch"))


def conflicts_in(path: Path) -> int:
    """Hunks that wait for a decision."""
    return path.read_bytes().count(b"\n<<<<<<< ") if path.is_file() else 0


def not_git(_folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == ".git"]


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def nano(folder: Path) -> Path:
    """The bundled nano in F32."""
    found = folder / "nano-F32.gguf"
    if not found.is_file():
        command = [
            sys.executable,
            "-m",
            "qwen_serve.convert",
            "--src",
            "models/nano",
            "--quant",
            "F32",
            "--out",
            folder,
        ]
        if (
            subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, check=False).returncode
            != 0
        ):
            raise BumpError(f"{' '.join(map(str, command))} failed")
    return found


def pin() -> str:
    """The pinned release."""
    wanted = re.search(rf'"{PACKAGE}==([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return wanted.group(1) if wanted else importlib.metadata.version(PACKAGE)


def main(arguments: list[str] | None = None) -> int:
    """0; 1 with what failed on stderr; 2 with a conflict to be solved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="of llama-cpp-python, such as 0.3.37")
    parser.add_argument("--sdist", type=Path, help="its sdist (else pip fetches it)")
    parser.add_argument("--base", type=Path, help="the pinned release's sdist (likewise)")
    parser.add_argument("--work", type=Path, default=ROOT / ".work" / "bump", help="folder (%(default)s)")
    parser.add_argument("--survey", action="store_true", help="only count conflicts, taking the patch's side")
    parser.add_argument("--skip-build", action="store_true", help="patches only: no library, no logits")
    parser.add_argument("--accept", action="store_true", help="write patches and pin into this tree")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    bump = Bump(options.version, pin(), options.work, options.survey)
    try:
        if options.accept:
            outcomes = [known["outcome"] for known in bump.state["patches"].values()]
            if not outcomes or not set(outcomes) <= DONE:
                raise BumpError("nothing to accept: the queue is not moved to its end")
            bump.accept()
            print(f"patches and pin are {options.version}'s; what is left to do: patches/moving-the-pin.md")
            return 0
        bump.open(options.sdist, options.base)
        try:
            bump.move()
        except BumpError as error:
            print(error, file=sys.stderr)
            return 2
        if options.survey:
            print(bump.report())
            return 0
        bump.export()
        if not options.skip_build:
            bump.build()
            bump.compare(nano(bump.work))
        bump.check()
    except BumpError as error:
        bump.work.mkdir(parents=True, exist_ok=True)
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if bump.work.is_dir():
            bump.save()
    print((bump.work / "report.md").read_text(encoding="utf-8"))
    failed = [name for name, step in bump.state["steps"].items() if "FAILED" in step["outcome"]]
    if failed:
        print(f"failed: {', '.join(failed)}; all of it is in {bump.work / 'report.md'}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
