"""GGUFs of the bundled nano model, converted once and shared by test sessions until their source changes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import upcycling
from tests.upcycling import upcycle

ROOT = Path(__file__).parent.parent
NANO = ROOT / "models" / "nano"
CACHE = ROOT / ".work" / "test-models"
QUICK = ["--calibration", f"{ROOT}/convert/calibration/prompts.toml", "--no-kld", "--threads", "1"]
"""The prompts themselves calibrate well enough for tests; having the model answer them takes minutes."""


os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="qwen-serve-tests-")
"""What servers measure at their start is theirs, not the user's."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts its background jobs so, and every program that a test interrupts would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def nano_gguf(quant: str, *, experts: bool = False) -> Path:
    """The nano model as `quant`, from a cache keyed by the checkpoint and by the converter's own sources.

    With `experts`, the model of experts that tests/upcycling.py makes of it.
    """
    folder = CACHE / _key()
    folder.mkdir(parents=True, exist_ok=True)
    name = "nano-moe" if experts else "nano"
    target = folder / f"{name}-{quant}.gguf"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            source = upcycle(NANO, folder / name) if experts else NANO
            wanted = ["--src", str(source), "--quant", quant, "--out", str(folder)]
            done = subprocess.run(
                [sys.executable, "-m", "convert", *wanted, *QUICK],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0 or not target.exists():
                pytest.fail(f"python -m convert --quant {quant} failed:\n{done.stdout}\n{done.stderr}")
    return target


def _key() -> str:
    digest = hashlib.sha256()
    sources = [Path(upcycling.__file__)]
    sources += [*NANO.glob("*.json"), *NANO.glob("*.safetensors"), *NANO.glob("*.txt"), *NANO.glob("*.jinja")]
    for folder in ("convert", "quant_recipes"):
        sources += [
            path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".toml", ".txt", ".json"}
        ]
    for path in sorted(sources):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="session")
def nano_f32() -> Path:
    """models/nano as an F32 GGUF."""
    return nano_gguf("F32")


@pytest.fixture(scope="session")
def nano_f16() -> Path:
    """models/nano as an F16 GGUF."""
    return nano_gguf("F16")


@pytest.fixture(scope="session")
def nano_q4_k_m() -> Path:
    """models/nano as a Q4_K_M GGUF, quantized with its importance matrix."""
    return nano_gguf("Q4_K_M")


@pytest.fixture(scope="session")
def nano_q2_k() -> Path:
    """models/nano as a Q2_K GGUF, quantized with its importance matrix."""
    return nano_gguf("Q2_K")


@pytest.fixture(scope="session")
def nano_moe_f32() -> Path:
    """A model of experts made of models/nano (tests/upcycling.py), as an F32 GGUF."""
    return nano_gguf("F32", experts=True)


@pytest.fixture(scope="session")
def nano_moe_q4_k_m() -> Path:
    """The same as a Q4_K_M GGUF, quantized with its importance matrix; its F16 GGUF lies beside it."""
    return nano_gguf("Q4_K_M", experts=True)
