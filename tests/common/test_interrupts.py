"""An interrupt ends the work at any moment, and never leaves it hanging."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from qwen_serve.common.interrupts import held
from tests.processes import run

# The writing of gguf_file.py without an end, interrupted after 1 to 5 ms. Without `held` it stands still once
# in some 50 times.
AGAIN_AND_AGAIN = """
import random, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from qwen_serve.convert import gguf_file

def work(*_):
    time.sleep(random.random() * 4e-4)
    return 1

gguf_file._jobs = lambda *_: iter(object, None)
gguf_file._run = work
path, plan = Path(sys.argv[1]), SimpleNamespace(tensors=())
progress = SimpleNamespace(advance=lambda n: None)
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
for _ in range(500):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001 + random.random() * 0.004)
        gguf_file._write_data(path, plan, None, 0, 4, progress)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_writing_a_file_ends_whenever_it_is_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    command = [sys.executable, "-c", AGAIN_AND_AGAIN, str(path)]
    done = run(command, check=True)
    assert done.stdout.split() == ["interrupted"] * 500


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_and_then_acts(sent: signal.Signals) -> None:
    acted: list[int] = []
    before = signal.signal(sent, lambda number, _: acted.append(number))
    try:
        with held():
            signal.raise_signal(sent)
            assert not acted
        assert acted == [sent]
        signal.raise_signal(sent)
        assert acted == [sent, sent]
    finally:
        signal.signal(sent, before)


def test_an_interrupt_goes_before_an_error_that_it_waited_for() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, held():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("the work's own")
    assert isinstance(raised.value.__context__, ValueError)


def test_other_threads_have_nothing_to_hold() -> None:
    seen: list[bool] = []

    def work() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with held():
            seen.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_an_interrupt_of_the_imports_says_nothing(tmp_path: Path) -> None:
    """The signal is raised before `main` runs, by a module that is imported first."""
    (tmp_path / "llama_cpp.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = run(
        [sys.executable, "-c", "import qwen_serve.convert.__main__"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
