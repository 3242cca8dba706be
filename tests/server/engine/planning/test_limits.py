"""For any number in a GGUF's key, the error names the key or the model loads: nothing aborts or hangs."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.server.engine import Engine, EngineSettings, ModelLoadError
from qwen_serve.server.engine.planning.spec import DraftSpec, ModelSpec

ROOT = Path(__file__).parents[4]
VALUES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1)

TIMEOUT = 60
"""Seconds for one model to load, and for the process that loads one after the other to begin."""


def numbers(path: Path) -> Iterator[tuple[str, int]]:
    """The architecture's integer keys, and each element of array keys."""
    reader = gguf.GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith(f"{architecture}."):
            for place, part in enumerate(field.data):
                if field.parts[part].dtype in (np.uint32, np.int32):
                    yield name, place


def changed(path: Path, to: Path, key: str, place: int, value: int) -> Path:
    shutil.copy(path, to)
    reader = gguf.GGUFReader(to, "r+")
    field = reader.fields[key]
    part = field.parts[field.data[place]]
    part[:] = np.array([value], np.uint32).view(part.dtype)
    reader.data.flush()
    return to


def load(model: Path, draft: Path | None) -> None:
    """Load and warm up the model, or refuse it."""
    settings = EngineSettings(
        model=model,
        draft_model=draft,
        parallel=2,
        ctx_size=512,
        ubatch_size=64,
        batch_size=64,
        threads=1,
        remember=False,
        speculation="draft" if draft else "both",
    )
    with contextlib.suppress(ModelLoadError):
        engine = Engine(settings)
        engine.start()
        engine.wait_ready(TIMEOUT)
        engine.close()


def load_each(path: str, to: str, target: str | None, cases: list[tuple[str, int, int]]) -> None:
    """What the process below runs: each change in turn, which it tells before it tries."""
    for case in cases:
        print(json.dumps(case), flush=True)
        made = changed(Path(path), Path(to), *case)
        load(Path(target) if target else made, made if target else None)


def check(path: Path, tmp_path: Path, target: Path | None) -> tuple[int, list[str]]:
    """How many changes are refused by the specification, and what went wrong with those that are not."""
    refused, wrong, cases, made = 0, [], [], tmp_path / "changed.gguf"
    for key, place in numbers(path):
        for value in VALUES:
            header = read_header(changed(path, made, key, place, value))
            try:
                if target is None:
                    ModelSpec.from_header(header)
                else:
                    DraftSpec.from_header(header, ModelSpec.from_header(read_header(target)))
            except ModelLoadError as error:
                refused += 1
                assert str(made) in str(error)
                continue
            cases.append((key, place, value))
    while cases:  # a process ends early where one of them ends it
        arguments = [str(path), str(made), str(target) if target else None, cases]
        code = f"from {__name__} import load_each; load_each(*{arguments!r})"
        with (tmp_path / "tried").open("w") as log:
            done = subprocess.Popen(
                [sys.executable, "-c", code], cwd=ROOT, stdout=log, stderr=subprocess.DEVNULL
            )
        tried = _until_it_ends(done, tmp_path / "tried")
        if done.returncode == 0:
            break
        wrong.append(
            f"{cases[tried - 1]}: {'it loads for ever' if done.returncode == -9 else done.returncode}"
        )
        cases = cases[tried:]
    return refused, wrong


def _until_it_ends(process: subprocess.Popen[bytes], log: Path) -> int:
    """How many models it began with, until its end or until one took too long."""
    tried = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TIMEOUT)
        before, tried = tried, len(log.read_text().splitlines())
        if process.returncode is None and tried == before:
            process.kill()
            process.wait()
        if process.returncode is not None:
            return max(tried, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["dense", "experts", "drafter"])
def test_any_number_is_refused_or_loads(
    kind: str, nano_q4_k_m: Path, nano_moe_f32: Path, nano_draft_q4_k_m: Path, tmp_path: Path
) -> None:
    path = {"dense": nano_q4_k_m, "experts": nano_moe_f32, "drafter": nano_draft_q4_k_m}[kind]
    refused, wrong = check(path, tmp_path, nano_q4_k_m if kind == "drafter" else None)
    assert refused > 20
    assert not wrong, "\n".join(wrong)
