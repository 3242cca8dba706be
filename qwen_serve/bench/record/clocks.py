"""Clocks, power and temperature of a GPU under load, from nvidia-smi."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import numpy as np

from qwen_serve.bench.record.document import Clocks, Spread

SECONDS = 5.0
BUSY = 50.0
"""Minimum utilization, in percent, of samples that count."""
SAMPLED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu")
FIXED = ("clocks.max.sm", "clocks.max.mem", "power.limit")


@contextmanager
def sampled(file: Path, seconds: float = SECONDS) -> Iterator[None]:
    """Append a sample to a file every ``seconds`` seconds; does nothing without a GPU."""
    if asked(FIXED) is None:
        yield
        return
    end = Event()

    def watch() -> None:
        with file.open("a", encoding="utf-8") as out:
            while not end.wait(seconds):
                if values := asked(SAMPLED):
                    out.write(json.dumps(values) + "\n")
                    out.flush()

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def clocks(file: Path) -> Clocks | None:
    """Statistics of the samples in which the GPU was busy; None without such samples."""
    if not file.is_file():
        return None
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("]")]
    busy = [line for line in lines if None not in line and line[SAMPLED.index("utilization.gpu")] >= BUSY]
    if not busy:
        return None
    sm, memory, power, temperature, _ = (_spread(column) for column in zip(*busy, strict=True))
    most = asked(FIXED) or [None] * len(FIXED)
    return Clocks(
        samples=len(busy),
        sm=sm,
        memory=memory,
        power=power,
        temperature=temperature,
        sm_most=most[0],
        memory_most=most[1],
        power_limit=most[2],
    )


def asked(fields: tuple[str, ...]) -> list[float | None] | None:
    """Values of ``fields`` for the GPU in use, None for those that it does not report; None without a GPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    command = ["nvidia-smi", f"--id={named}", f"--query-gpu={','.join(fields)}"]
    command.append("--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0 or not done.stdout.strip():
        return None
    return [_number(text) for text in done.stdout.splitlines()[0].split(",")]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return None


def _spread(values: tuple[float, ...]) -> Spread:
    p10, p50, p90 = np.quantile(values, [0.1, 0.5, 0.9])
    return Spread(p10=float(p10), p50=float(p50), p90=float(p90))
