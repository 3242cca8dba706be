"""Pictures through libmtmd: number of rows, positions, and errors."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from PIL import Image

from qwen_serve.convert.cli import main
from qwen_serve.llamacpp import Model
from qwen_serve.llamacpp.errors import LlamaError, ModelLoadError
from qwen_serve.llamacpp.vision import ImageRows, VisionTower, has_vision
from tests.checkpoints import HIDDEN, PATCH, write_checkpoint
from tests.processes import run

pytestmark = pytest.mark.skipif(not has_vision(), reason="llama.cpp was built without libmtmd")

TOKEN = 2 * PATCH
"""Pixels along either side of what becomes one row."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model and its tower, in F32."""
    made = tmp_path_factory.mktemp("seeing")
    checkpoint = write_checkpoint(made / "Random-1B", vision=True)
    assert main(["--src", str(checkpoint), "--out", str(made), "--quant", "F32", "--outtype", "F32"]) == 0
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with Model(folder / "Random-1B-F32.gguf", n_gpu_layers=0) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def tower(folder: Path, model: Model) -> Iterator[VisionTower]:
    with VisionTower(folder / "mmproj-Random-1B-F32.gguf", model, threads=1, warm_up=False) as loaded:
        yield loaded


def picture(width: int, height: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(("columns", "rows"), [(4, 3), (3, 4), (8, 1), (1, 9), (5, 5)])
def test_a_picture_takes_a_grid_of_positions(tower: VisionTower, columns: int, rows: int) -> None:
    """The time axis does not advance within it. The next token's position follows its longer side
    (transformers' get_rope_index)."""
    found = tower.prepare(picture(columns * TOKEN, rows * TOKEN))
    assert (found.n_rows, found.n_pos) == (columns * rows, max(columns, rows))
    row, column = np.divmod(np.arange(columns * rows), columns)
    expected = np.stack([np.zeros_like(row), row, column, np.zeros_like(row)])
    np.testing.assert_array_equal(found.positions, expected)


@pytest.mark.parametrize(
    ("width", "height", "columns", "rows"),
    [
        (4 * TOKEN + 3, 3 * TOKEN - 3, 4, 3),  # to the nearest whole rows
        (1, 1, 3, 3),  # at least eight rows
        (TOKEN, 10 * TOKEN, 1, 10),
        (1000, 2, 125, 1),
    ],
)
def test_other_sizes_are_resized(
    tower: VisionTower, width: int, height: int, columns: int, rows: int
) -> None:
    for found in (tower.prepare(picture(width, height)), tower.measure(width, height)):
        assert found.positions[2].max() + 1 == columns
        assert found.positions[1].max() + 1 == rows


def test_a_picture_is_stretched_to_whole_rows(tower: VisionTower) -> None:
    """As in transformers, without padding."""
    size = 4 * TOKEN, 3 * TOKEN
    for given in (
        picture(4 * TOKEN - 3, 3 * TOKEN + 3),
        np.full((3 * TOKEN, 4 * TOKEN - 3, 3), 255, np.uint8),
    ):
        whole = np.asarray(Image.fromarray(given).resize(size, Image.Resampling.BICUBIC))
        rows = tower.encode(tower.prepare(given))
        np.testing.assert_array_equal(rows, tower.encode(tower.prepare(whole)))


def test_bounds_on_rows(folder: Path, model: Model) -> None:
    path = folder / "mmproj-Random-1B-F32.gguf"
    with VisionTower(path, model, threads=1, min_tokens=20, max_tokens=40, warm_up=False) as bounded:
        assert 20 <= bounded.measure(2 * TOKEN, 2 * TOKEN).n_rows <= 40
        assert 20 <= bounded.measure(50 * TOKEN, 70 * TOKEN).n_rows <= 40


def test_the_same_picture_encodes_alike_and_another_otherwise(tower: VisionTower) -> None:
    first, again, other = (
        tower.encode(tower.prepare(picture(4 * TOKEN, 3 * TOKEN, seed))) for seed in (1, 1, 2)
    )
    assert first.shape == (12, HIDDEN)
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01


def test_rows_stay_when_the_next_picture_is_encoded(tower: VisionTower) -> None:
    first = tower.encode(tower.prepare(picture(4 * TOKEN, 3 * TOKEN, 1)))
    kept = first.copy()
    tower.encode(tower.prepare(picture(5 * TOKEN, 5 * TOKEN, 2)))
    np.testing.assert_array_equal(first, kept)


def test_a_measured_size_is_no_picture(tower: VisionTower) -> None:
    with pytest.raises(LlamaError, match="mtmd_encode_chunk returned 1"):
        tower.encode(tower.measure(4 * TOKEN, 3 * TOKEN))


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 4), (0, 8, 3)])
def test_what_is_no_rgb_picture(tower: VisionTower, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"want bytes of shape \[height, width, 3\]"):
        tower.prepare(np.zeros(shape, np.uint8))


def test_a_file_that_is_no_mmproj(folder: Path, model: Model, tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", folder / "Random-1B-F32.gguf"):
        with pytest.raises(ModelLoadError, match=f"could not load {path}: "):
            VisionTower(path, model, threads=1)


def test_another_models_tower(nano_f16: Path, folder: Path) -> None:
    """Its rows have another width."""
    with (
        Model(nano_f16, n_gpu_layers=0) as nano,
        pytest.raises(ModelLoadError, match=r"mismatch|n_embd"),
    ):
        VisionTower(folder / "mmproj-Random-1B-F32.gguf", nano, threads=1)


def test_prepared_pixels_are_each_pictures_own(tower: VisionTower) -> None:
    kept: list[ImageRows] = [tower.prepare(picture(4 * TOKEN, 3 * TOKEN, seed)) for seed in range(3)]
    rows = [tower.encode(one) for one in kept]
    assert np.abs(rows[0] - rows[2]).max() > 0.01


LOADED = """
import llama_cpp.llama_cpp as llama
from qwen_serve.llamacpp.vision import has_vision
assert has_vision()
from llama_cpp import mtmd_cpp
print(mtmd_cpp._libmtmd_base_path, llama._base_path, sep="\\n")
"""


def test_both_libraries_are_of_the_build_that_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    folder.symlink_to(Path(llama_cpp.__file__).parent / "lib")
    environment = {name: value for name, value in os.environ.items() if name != "MTMD_CPP_LIB"}
    environment["LLAMA_CPP_LIB_PATH"] = str(folder)
    done = run([sys.executable, "-c", LOADED], check=True, env=environment)
    assert done.stdout.splitlines() == [str(folder)] * 2
