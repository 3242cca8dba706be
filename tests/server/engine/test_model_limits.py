"""Whatever number a key of a GGUF has, it is refused by name or the model loads: nothing aborts or hangs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from server.engine import ModelLoadError
from server.engine.draft_spec import DraftSpec
from server.engine.gguf import read_header
from server.engine.model_spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
VALUES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1)

START = """
import sys
from pathlib import Path
from server.engine import Engine, EngineSettings, ModelLoadError
model, draft = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None
settings = EngineSettings(
    model=model, draft_model=draft, parallel=2, ctx_size=512, ubatch_size=64, batch_size=64, threads=1,
    remember=False, speculation="draft" if draft else "both",
)
try:
    engine = Engine(settings)
    engine.start()
    engine.wait_ready(60)
    engine.close()
except ModelLoadError as error:
    print(error)
"""


def numbers(path: Path) -> Iterator[tuple[str, int]]:
    """Keys of whole numbers that belong to the architecture, and for arrays each place."""
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


def check(path: Path, tmp_path: Path, target: Path | None) -> tuple[int, list[str]]:
    """How many changes are refused by the specification, and what went wrong with those that are not."""
    refused, wrong = 0, []
    for key, place in numbers(path):
        for value in VALUES:
            made = changed(path, tmp_path / "changed.gguf", key, place, value)
            try:
                header = read_header(made)
                if target is None:
                    ModelSpec.from_header(header)
                else:
                    DraftSpec.from_header(header, ModelSpec.from_header(read_header(target)))
            except ModelLoadError as error:
                refused += 1
                assert str(made) in str(error)
                continue
            files = [made] if target is None else [target, made]
            command = [sys.executable, "-c", START, *map(str, files)]
            try:
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, timeout=60, text=True, check=False
                )
            except subprocess.TimeoutExpired:
                wrong.append(f"{key}[{place}] = {value}: it loads for ever")
                continue
            if done.returncode:
                wrong.append(f"{key}[{place}] = {value}: exit {done.returncode}: {done.stderr[-300:]}")
    return refused, wrong


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
