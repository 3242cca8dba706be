"""The commands of the pages that make models, in one fresh clone, in any order: none is in another's way."""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run
from tests.test_commands import COMMANDS, ROOT, environment
from tests.waiting import wait_until

MAKES = re.compile(
    r"make serve$|make convert SRC=models/nano |qwen-convert --src models/nano|qwen-bench sweep "
)
NOT_HERE = ("QUANT=auto", "--distill", "stock.toml", "mine.toml")
"""A search takes minutes, and writes files with names of its own; torch; files that the reader writes."""
OTHER_TEXT = "calibration.txt"
"""What `make serve` does not calibrate with, so that the same name has other bytes; and in seconds, where the
model's own answers would take minutes."""

PAGES = [command.text for command in COMMANDS if MAKES.match(command.text)]
WANTED = [
    *dict.fromkeys(text for text in PAGES if not any(part in text for part in NOT_HERE)),
    "make convert SRC=models/nano QUANT=Q4_K_M",
]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What git checks out, and an environment."""
    for name in ("Makefile", "pyproject.toml", "qwen_serve", "bench", "convert", "quant_recipes", "variants"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    (tmp_path / "models").mkdir()
    (tmp_path / "out").symlink_to("models")
    for name in ("nano", "nano-dflash"):
        (tmp_path / "models" / name).symlink_to(ROOT / "models" / name)
    prompts = (ROOT / "models" / "nano" / "README.md").read_text(encoding="utf-8")
    (tmp_path / OTHER_TEXT).write_text(prompts * 3, encoding="utf-8")
    return tmp_path


def quicker(text: str) -> str:
    """The same command with little text, one thread, and no measurements."""
    least = f"--calibration {OTHER_TEXT} --no-kld"
    quick = f"{least} --threads 1"
    text = text.replace("/tmp/out", "out")
    if text.startswith("make convert"):
        return f"{text} ARGS={shlex.quote(quick)}"
    if text.startswith("qwen-bench sweep"):
        return f"{text} --tasks none --rounds 0 --threads 1 --convert-options={shlex.quote(least)}"
    drafter = "nano-dflash" in text
    return f"{text} {quick}" if text.startswith("qwen-convert") and not drafter else text


def without_setup(text: str) -> str:
    """The same command, without the target that installs what the environment has."""
    return re.sub("^make ", "make -o setup ", text)


def runs(text: str, folder: Path) -> None:
    """Runs a command to its end; a server until it is ready."""
    text = quicker(text)
    if "make serve" not in text:
        done = run(["bash", "-c", without_setup(text)], cwd=folder, env=environment(folder))
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {without_setup(text)} PORT=0"],
            cwd=folder,
            env=environment(folder),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        wait_until(lambda: server.poll() is not None or "ready at" in log.read_text(), 300)
        assert "ready at" in log.read_text(), log.read_text()[-2000:]
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Ends make and the server below it."""
    os.killpg(server.pid, signal.SIGTERM)
    server.wait(60)


def test_the_pages_have_such_commands() -> None:
    assert "make serve" in WANTED
    assert len(WANTED) >= 5


def in_order(kind: str) -> list[str]:
    if kind == "shuffled":
        return random.Random(3).sample(WANTED, len(WANTED))
    return WANTED if kind == "as they come" else WANTED[::-1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", ["as they come", "backwards", "shuffled"])
def test_they_run_in_any_order(order: str, clone: Path) -> None:
    for text in in_order(order):
        runs(text, clone)


def test_make_serve_and_make_convert_know_each_others_files(clone: Path) -> None:
    """Each of them first: their files have the same names, and other bytes."""
    for text in ("make models/nano-Q4_K_M.gguf", "make convert SRC=models/nano QUANT=Q4_K_M"):
        runs(text, clone)
    model = clone / "models" / "nano-Q4_K_M.gguf"
    model.unlink()
    runs("make models/nano-Q4_K_M.gguf", clone)
    assert model.is_file()


def test_a_file_of_somebody_elses_stays(clone: Path) -> None:
    own = clone / "models" / "nano-Q4_K_M.gguf"
    own.write_bytes(b"mine")
    text = quicker("make convert SRC=models/nano QUANT=Q4_K_M")
    done = run(["bash", "-c", without_setup(text)], cwd=clone, env=environment(clone))
    assert done.returncode != 0
    assert "was not made by this command" in done.stderr
    assert own.read_bytes() == b"mine"


def test_reasons_are_needed() -> None:
    assert all(any(part in text for text in PAGES) for part in NOT_HERE)
