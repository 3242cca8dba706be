"""A fresh clone works without an installation: the doors start the package's programs, make serves nano."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import run
from tests.server.serving import ServerProcess
from tests.tree import ROOT, git

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("MAKE", "MFLAGS", "ARGS", "PYTHON", "QWEN_"))
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree with what is not committed yet, without symbolic links, as on Windows."""
    folder = tmp_path_factory.mktemp("clone") / "qwen-serve"
    run(["git", "clone", "--quiet", "-c", "core.symlinks=false", ROOT, folder], check=True)
    for name in git("ls-files", "--modified", "--others", "--exclude-standard"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("script", "usage"),
    [
        ("bench", "Usage: qwen-bench COMMAND"),
        pytest.param("bench/sweep.py", "Usage: qwen-bench sweep ", marks=pytest.mark.slow),
        pytest.param("convert", "usage: qwen-convert ", marks=pytest.mark.slow),
        ("server", "usage: python -m qwen_serve.server "),
    ],
)
def test_a_door_starts_the_program_beside_it(clone: Path, tmp_path: Path, script: str, usage: str) -> None:
    """From any folder, and not the package that is installed."""
    package = clone / "qwen_serve" / "__init__.py"
    text = package.read_text(encoding="utf-8")
    package.write_text(f'{text}import sys\nsys.stderr.write("of the clone\\n")\n')
    done = run([sys.executable, str(clone / script), "--help"], cwd=tmp_path, env=ENVIRONMENT)
    package.write_text(text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(usage)
    assert done.stderr == "of the clone\n"


class Made(ServerProcess):
    """What make starts."""

    def command(self, arguments: list[str]) -> list[str]:
        return ["make", *arguments]

    def kill(self) -> None:
        self.process.terminate()  # make passes this on
        self.wait()


@pytest.mark.slow
def test_make_serve_answers(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With this environment, its llama.cpp included, in place of the one that make would fill."""
    for name in os.environ.keys() - ENVIRONMENT.keys():
        monkeypatch.delenv(name)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".serve").touch()
    make = ["-C", str(clone), "-o", "llama", f"VENV={tmp_path}"]
    run(["make", *make, "models/nano-Q4_K_M.gguf"], check=True)
    with Made(*make, "serve", "PORT=0", "ARGS=--threads 1") as server, server.client() as http:
        answer = http.post("/v1/completions", json={"prompt": "The quick brown fox", "max_tokens": 8})
        assert answer.json()["choices"][0]["text"]
