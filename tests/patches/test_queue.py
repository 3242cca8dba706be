"""The queue: its files say what a reader needs; what is built with it computes what stock llama.cpp does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qwen_serve.bench.servers.builds import build_programs, llama_cpp_sources
from qwen_serve.llamacpp.patches import patches
from tests.conftest import nano_gguf
from tests.patches.rows import RUNS
from tests.processes import run

PATCHES = Path(__file__).parents[2] / "patches"
QUEUE = sorted(Path(os.environ.get("PATCH_QUEUE", PATCHES / "llama.cpp")).glob("*.patch"))
"""patches/bump.py has the queue that it moved tested before it is the tree's."""
ROWS = Path(__file__).parent / "rows.py"


@pytest.mark.parametrize("patch", QUEUE, ids=lambda path: path.stem)
def test_a_header_says_what_why_measured_and_upstream(patch: Path) -> None:
    header = patch.read_text().split("\ndiff --git ")[0]
    assert re.search(r"^From: .+$", header, re.MULTILINE), "git am needs it"
    assert re.search(r"^Subject: \[PATCH\] \S.* : \S.+", header, re.MULTILINE), "[PATCH] module : what"
    assert re.search(r"\b([Mm]easured)\b", header)
    assert re.search(r"^Upstream: ", header, re.MULTILINE)


def test_the_order_is_that_of_the_numbers() -> None:
    assert QUEUE, "no queue"
    assert all(re.fullmatch(r"\d{4}-[a-z0-9-]+\.patch", patch.name) for patch in QUEUE)
    assert len({patch.name[:4] for patch in QUEUE}) == len({patch.name[5:] for patch in QUEUE}) == len(QUEUE)


def test_every_topic_has_a_page_that_names_its_patches() -> None:
    """The first two digits of a patch's number are its topic's."""
    pages = {page.name[:2]: page.read_text() for page in (PATCHES / "topics").glob("*.md")}
    assert sorted(pages) == sorted({patch.name[:2] for patch in QUEUE})
    for patch in QUEUE:
        assert f"`{patch.stem[5:]}`" in pages[patch.name[:2]]


def test_the_loaded_library_tells_what_it_has() -> None:
    """Which may be an older queue than this one, or nothing: stock."""
    assert all(re.fullmatch(r"[a-z][a-z0-9-]+", name) for name in patches())


@pytest.fixture(scope="module")
def libraries() -> dict[str, Path]:
    """The folders of libllama, stock and patched (llama-quantize brings them)."""
    folders = {}
    for name, wanted in (("stock", "0"), ("patched", "1")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATCHES", wanted)
            folders[name] = build_programs(["llama-quantize"])
    return folders


def rows(
    library: Path, model: Path, out: Path, *options: str
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    command = [sys.executable, str(ROWS), "--model", str(model), "--out", str(out), *options]
    paths = {"LLAMA_CPP_LIB_PATH": str(library), "LD_LIBRARY_PATH": str(library)}
    subprocess.run(command, env=os.environ | paths, check=True, capture_output=True, timeout=600)
    with np.load(out) as file:
        loaded: np.ndarray[tuple[int, int], np.dtype[np.float32]] = file["rows"]
    return loaded


@pytest.mark.reference
@pytest.mark.parametrize(("options", "bound"), RUNS)
def test_logits_are_those_of_stock(
    libraries: dict[str, Path], tmp_path: Path, options: str, bound: float
) -> None:
    """The largest difference, in standard deviations of the logits."""
    model = nano_gguf("F32")
    stock, patched = (
        rows(libraries[name], model, tmp_path / f"{name}.npz", *options.split())
        for name in ("stock", "patched")
    )
    assert stock.shape == patched.shape
    assert len(stock) > 300
    assert np.isfinite(patched).all()
    assert np.abs(stock - patched).max() < bound * stock.std()


@pytest.mark.reference
@pytest.mark.parametrize("options", ["--f32 --seed 6", "--streams --seed 7", "--flash --seed 8"])
def test_shared_snapshots_are_those_of_every_cell(
    libraries: dict[str, Path], tmp_path: Path, options: str
) -> None:
    model, every = nano_gguf("F32"), [*options.split(), "--snapshots", "5"]
    first, second = (
        rows(libraries["patched"], model, tmp_path / f"{len(more)}.npz", *every, *more)
        for more in ([], ["--shared"])
    )
    assert len(first) > 300
    assert np.array_equal(first, second)


@pytest.mark.reference
def test_masks_are_those_of_stock(libraries: dict[str, Path], tmp_path: Path) -> None:
    """llama.cpp's test that a patch brings: random cells, every mask compared with the function as it was."""
    sources, library = llama_cpp_sources(), libraries["patched"]
    # the sources may be the stock ones now
    subprocess.run(["cmake", library.parent], check=True, capture_output=True)
    program = tmp_path / "test-kv-mask"
    command = [
        "c++",
        "-std=c++17",
        "-O1",
        f"-I{sources}/include",
        f"-I{sources}/ggml/include",
        "-o",
        str(program),
    ]
    command += [
        f"{sources}/tests/test-kv-mask.cpp",
        f"-L{library}",
        "-lllama",
        "-lggml-base",
        f"-Wl,-rpath,{library}",
    ]
    subprocess.run(command, check=True)
    done = run([program], check=True)
    assert "masks are equal" in done.stdout


@pytest.mark.reference
def test_the_operator_tests_compile(libraries: dict[str, Path]) -> None:
    """llama.cpp's test-backend-ops, which nothing else builds without a card."""
    sources = llama_cpp_sources()
    subprocess.run(["cmake", libraries["patched"].parent], check=True, capture_output=True)
    includes = [f"-I{sources / folder}" for folder in ("include", "ggml/include", "common", "src", "vendor")]
    command = ["c++", "-std=c++17", "-fsyntax-only", *includes, f"{sources}/tests/test-backend-ops.cpp"]
    done = run(command)
    assert done.returncode == 0, done.stderr


@pytest.mark.reference
def test_switches_apply_on_top(libraries: dict[str, Path]) -> None:
    subprocess.run(["cmake", libraries["patched"].parent], check=True, capture_output=True)
    command = ["patch", "-p1", "--fuzz=0", "--dry-run", "-i", str(PATCHES / "switches.patch")]
    done = run(command, cwd=llama_cpp_sources())
    assert done.returncode == 0, done.stdout


UPSTREAM = sorted((PATCHES / "upstream").glob("*.patch"))


@pytest.mark.parametrize("patch", UPSTREAM, ids=lambda path: path.stem)
def test_what_goes_upstream_has_a_title_and_a_row(patch: Path) -> None:
    """No description: who sends it writes that."""
    header = patch.read_text().split("\ndiff --git ")[0]
    assert re.fullmatch(r"Subject: \[PATCH\] \S.*: \S.+\n", header)
    assert f"| [{patch.stem}](" in (patch.parent / "README.md").read_text()


COMPILED = re.compile(r"(src|tests|ggml/src/ggml-cpu)/.*\.cpp")
FOLDERS = ("include", "ggml/include", "ggml/src", "ggml/src/ggml-cpu", "src", "common", "vendor", "tests")


@pytest.mark.reference
@pytest.mark.timeout(3600)
def test_each_patch_compiles_on_those_before_it(libraries: dict[str, Path], tmp_path: Path) -> None:
    """What it touches; where that is a header, each source of libllama that some patch touches. No CUDA."""
    subprocess.run(["cmake", libraries["stock"].parent], check=True, capture_output=True)
    for folder in ("include", "ggml", "src", "common", "vendor", "tests"):
        shutil.copytree(llama_cpp_sources() / folder, tmp_path / folder)
    touched = {patch: re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE) for patch in QUEUE}
    some = {path for paths in touched.values() for path in paths if path.startswith("src/")}
    flags = ["-std=c++17", "-fsyntax-only", "-w", *(f"-I{folder}" for folder in FOLDERS)]
    for patch, paths in touched.items():
        subprocess.run(["patch", "-p1", "-s", "-F0", "-i", patch], cwd=tmp_path, check=True)
        wanted = {*paths, *(some if any(path.endswith(".h") for path in paths) else ())}
        for path in sorted(path for path in wanted if COMPILED.fullmatch(path)):
            if (tmp_path / path).is_file():
                command = [os.environ.get("CXX", "c++"), *flags, path]
                done = run(command, cwd=tmp_path)
                assert done.returncode == 0, f"{patch.stem}: {done.stderr[:2000]}"


@pytest.mark.reference
def test_what_goes_upstream_applies_to_stock_sources(libraries: dict[str, Path]) -> None:
    subprocess.run(["cmake", libraries["stock"].parent], check=True, capture_output=True)
    for patch in UPSTREAM:
        command = ["patch", "-p1", "--fuzz=0", "--dry-run", "-i", str(patch)]
        done = run(command, cwd=llama_cpp_sources())
        assert done.returncode == 0, f"{patch.name}: {done.stdout}"
