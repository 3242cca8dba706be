"""GGUFs of the bundled nano model, converted once and shared by test sessions until their source changes."""

import atexit
import fcntl
import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings

from qwen_serve.llamacpp import Model
from tests import upcycling
from tests.drafters import converted, some_tokens, with_own_vocabulary
from tests.upcycling import upcycle

ROOT = Path(__file__).parent.parent
NANO = ROOT / "models" / "nano"
NANO_DRAFT = ROOT / "models" / "nano-dflash"
CACHE = ROOT / ".work" / "test-models"
QUICK = ["--calibration", f"{ROOT}/qwen_serve/convert/calibration/prompts.toml", "--no-kld", "--threads", "1"]
"""The prompts themselves calibrate well enough for tests; having the model answer them takes minutes."""
TEXT = ["--no-vision"]
"""A tower beside the model would be loaded by every server that a test starts."""


if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has all of this from the process that started it
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="qwen-serve-tests-")
    """What servers measure at their start is theirs, not the user's; all of a session share it."""
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

    # httpx reads all certificates of the system for each client: 60 ms, for servers that have none
    bundle = Path(os.environ["XDG_CACHE_HOME"]) / "one.pem"
    end = "-----END CERTIFICATE-----\n"
    bundle.write_text(Path(certifi.where()).read_text(encoding="utf-8").partition(end)[0] + end)
    os.environ["SSL_CERT_FILE"] = str(bundle)

    # what a test starts is a new Python: it need not compile our modules each time, nor a worker all tests
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False

    # several tests run at a time: threads that wait for each other leave the cores to those who compute
    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"})

# how long an example takes depends on what else the machine does
settings.register_profile("any-speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-speed")
settings.register_profile("repeatable", derandomize=True)
if "FUZZ_CASES" not in os.environ:
    settings.load_profile("repeatable")
    """A change is not held up by what it did not touch; `make fuzz` looks for new examples."""
    with suppress(ImportError):  # of a version that does not do this
        from hypothesis.internal.conjecture import providers
        from hypothesis.internal.constants_ast import Constants

        # else examples also contain literals of all modules that happen to be imported
        providers._get_local_constants = Constants  # noqa: SLF001 - there is no setting

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts its background jobs so, and every program that a test interrupts would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is imported stays: no collection in a test need look at it."""
    gc.collect()
    gc.freeze()


def nano_gguf(quant: str, *, experts: bool = False) -> Path:
    """The nano model as `quant`, from a cache keyed by the checkpoint and by the converter's own sources.

    With `experts`, the model of experts that tests/upcycling.py makes of it.
    """
    if not experts:
        return _converted("nano", quant, lambda _: ["--src", str(NANO), *TEXT, *QUICK])
    return _converted(
        "nano-moe", quant, lambda folder: ["--src", str(upcycle(NANO, folder / "nano-moe")), *TEXT, *QUICK]
    )


def nano_draft_gguf(quant: str) -> Path:
    """The nano model's bundled block drafter as `quant`, from the same cache."""
    return _converted("nano-dflash", quant, lambda _: ["--src", str(NANO_DRAFT), "--target", str(NANO)])


def _converted(name: str, quant: str, source: Callable[[Path], list[str]]) -> Path:
    folder = CACHE / _key()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{quant}.gguf"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            wanted = [*source(folder), "--quant", quant, "--out", str(folder)]
            done = subprocess.run(
                [sys.executable, "-m", "qwen_serve.convert", *wanted],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0 or not target.exists():
                pytest.fail(f"qwen-convert --quant {quant} failed:\n{done.stdout}\n{done.stderr}")
    return target


def _key() -> str:
    digest = hashlib.sha256()
    sources = [Path(upcycling.__file__)]
    sources += NANO_DRAFT.glob("*.*")
    sources += [*NANO.glob("*.json"), *NANO.glob("*.safetensors"), *NANO.glob("*.txt"), *NANO.glob("*.jinja")]
    for folder in ("qwen_serve/convert", "quant_recipes"):
        files = (ROOT / folder).rglob("*")
        found = [path for path in files if path.suffix in {".py", ".toml", ".txt", ".json"}]
        assert found, f"{folder} is empty: converted models would outlive the converter"
        sources += found
    for path in sorted(sources):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="session")
def nano_f32() -> Path:
    """models/nano as an F32 GGUF."""
    return nano_gguf("F32")


@pytest.fixture(scope="session")
def model(nano_f32: Path) -> Iterator[Model]:
    """The loaded model, on the host, for tests that do not change it."""
    from qwen_serve.llamacpp import Model

    with Model(nano_f32, n_gpu_layers=0) as model:
        yield model


@pytest.fixture(scope="session")
def nano_draft_f32() -> Path:
    """models/nano-dflash as an F32 GGUF."""
    return nano_draft_gguf("F32")


@pytest.fixture(scope="session")
def nano_draft_own_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a reduced vocabulary of two thirds of nano's tokens."""
    folder = tmp_path_factory.mktemp("own-vocabulary") / "nano-own"
    return converted(with_own_vocabulary(folder, some_tokens(2 / 3)))


@pytest.fixture(scope="session")
def nano_draft_q4_k_m() -> Path:
    """models/nano-dflash as a Q4_K_M GGUF."""
    return nano_draft_gguf("Q4_K_M")


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
