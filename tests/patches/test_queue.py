"""The patches and our own sources: their documentation is complete, and patched llama.cpp computes what stock
llama.cpp does."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from qwen_serve.bench.servers.builds import build_programs, llama_cpp_sources
from qwen_serve.llamacpp.patches import patches
from qwen_serve.server.build_machine import processors
from qwen_serve.server.llama_build import SOURCES
from tests.conftest import nano_gguf
from tests.patches.changes import changes, changes_of
from tests.patches.rows import RUNS
from tests.processes import run

PATCHES = Path(__file__).parents[2] / "patches"
NATIVE = PATCHES.parent / "native"
QUEUE = sorted(Path(os.environ.get("PATCH_QUEUE", PATCHES / "llama.cpp")).glob("*.patch"))
"""patches/bump.py has the queue that it moved tested before it is the tree's."""
ROWS = Path(__file__).parent / "rows.py"


@pytest.mark.parametrize("patch", QUEUE, ids=lambda path: path.stem)
def test_a_patch_only_hooks_and_its_header_says_what_changes(patch: Path) -> None:
    """What is new is a file in native/, so that it is read as source."""
    header, _, diff = patch.read_text().partition("\ndiff --git ")
    assert re.search(r"^From: .+$", header, re.MULTILINE), "git am needs it"
    assert re.search(r"^Subject: \[PATCH\] \S.* : \S.+", header, re.MULTILINE), "[PATCH] module : what"
    assert re.findall(r"^([a-z0-9-]+): \S", header, re.MULTILINE) == changes_of(patch)
    assert f"patches/notes/{patch.stem}.md" in header
    assert not re.search(r"^(new file|deleted file|--- /dev/null)", diff, re.MULTILINE)


def test_the_queue_stays_small() -> None:
    """Functions of ours are in native/, where an edit of upstream's file cannot get in their way."""
    assert sum(patch.read_text().count("\n") for patch in QUEUE) <= 9_300


def test_the_order_is_that_of_the_numbers() -> None:
    assert QUEUE, "no queue"
    assert all(re.fullmatch(r"\d\d-[a-z0-9-]+\.patch", patch.name) for patch in QUEUE)
    assert len({patch.name[:2] for patch in QUEUE}) == len(QUEUE)
    names = changes(QUEUE[0].parent)
    assert len(set(names)) == len(names)


def test_every_topic_has_pages_that_name_its_changes() -> None:
    """The notes say what was measured of each, and what upstream has."""
    for folder in ("topics", "notes"):
        assert {page.stem for page in (PATCHES / folder).glob("*.md")} >= {patch.stem for patch in QUEUE}
    for patch in QUEUE:
        page = (PATCHES / "topics" / f"{patch.stem}.md").read_text()
        parts = re.split(r"^## ", (PATCHES / "notes" / f"{patch.stem}.md").read_text(), flags=re.MULTILINE)
        notes = dict(part.split("\n", 1) for part in parts[1:])
        assert list(notes) == changes_of(patch)
        for name, note in notes.items():
            assert f"`{name}`" in page
            assert re.search(r"\b[Mm]easured\b", note)
            assert re.search(r"^Upstream: ", note, re.MULTILINE)


def test_every_own_source_is_compiled_or_included() -> None:
    """patches/apply.cmake compiles those of these folders."""
    files = {path.relative_to(NATIVE) for path in NATIVE.rglob("*") if path.is_file()}
    compiled = {path for path in files if path.suffix in {".c", ".cpp", ".cu"}}
    others = {path for path in files if path.suffix not in SOURCES}
    assert others <= {Path("README.md"), Path(".clang-format")}
    assert {path.parent.as_posix() for path in compiled} <= {"ggml/src/ggml-cuda", "src", "tests"}
    text = "".join(path.read_text() for path in [*QUEUE, *(NATIVE / path for path in files - others)])
    text += (PATCHES / "apply.cmake").read_text()
    included = files - compiled - others
    assert included
    assert not [path for path in included if not re.search(rf'#include ".*\b{re.escape(path.name)}"', text)]


def test_the_loaded_library_tells_what_it_has() -> None:
    """It may have an older queue than this one, or none (stock)."""
    assert all(re.fullmatch(r"[a-z][a-z0-9-]+", name) for name in patches())


FOLDERS = ("include", "ggml", "src", "common", "vendor", "tests")
"""Of llama.cpp's sources: what patches touch, and what that includes."""


@pytest.fixture(scope="module")
def libraries() -> dict[str, Path]:
    """The folders of libllama: stock (llama-quantize brings it), and the installed one, which is patched."""
    assert patches() == tuple(changes(QUEUE[0].parent)), "another queue is installed: make setup"
    return {
        "stock": build_programs(["llama-quantize"], patched=False),
        "patched": Path(llama_cpp.__file__).parent / "lib",
    }


@pytest.fixture(scope="module")
def stock(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of llama.cpp's stock sources."""
    sources, made = llama_cpp_sources(), tmp_path_factory.mktemp("stock")
    for folder in FOLDERS:
        shutil.copytree(sources / folder, made / folder)
    for patch in sorted((sources / ".patches").glob("*.patch"), reverse=True):  # a build has left them there
        apply(patch, made, "--reverse")
    return made


@pytest.fixture(scope="module")
def patched(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with the queue applied, and our own sources where a compiler finds them beside upstream's."""
    made = shutil.copytree(stock, tmp_path_factory.mktemp("patched"), dirs_exist_ok=True)
    for patch in QUEUE:
        apply(patch, made)
    shutil.copytree(NATIVE, made, dirs_exist_ok=True)
    return made


def apply(patch: Path, sources: Path, *options: str) -> None:
    done = run(["patch", "-p1", "-s", "-F0", *options, "-i", patch], cwd=sources)
    assert done.returncode == 0, f"{patch.name}: {done.stdout}"


def rows(
    library: Path, model: Path, out: Path, *options: str
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    command = [sys.executable, str(ROWS), "--model", str(model), "--out", str(out), *options]
    given = {"LLAMA_CPP_LIB_PATH": str(library), "LD_LIBRARY_PATH": str(library), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, env=os.environ | given, check=True, capture_output=True, timeout=600)
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
    libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """Bit for bit without ragged passes, which only shared ones allow and which round otherwise."""
    model, every = nano_gguf("F32"), [*options.split(), "--snapshots", "5"]
    monkeypatch.setenv("LLAMA_RAGGED_PASSES", "0")
    first, second = (
        rows(libraries["patched"], model, tmp_path / f"{len(more)}.npz", *every, *more)
        for more in ([], ["--shared"])
    )
    assert len(first) > 300
    assert np.array_equal(first, second)
    monkeypatch.setenv("LLAMA_RAGGED_PASSES", "1")
    ragged = rows(libraries["patched"], model, tmp_path / "ragged.npz", *every, "--shared")
    assert np.abs(ragged - first).max() < 1e-5 * first.std()


@pytest.mark.reference
@pytest.mark.parametrize(
    "options", ["--flash --f32 --seed 9", "--flash --f32 --seed 10 --snapshots 5 --shared"]
)
def test_padded_steps_have_the_bits_of_others(
    libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    found, reused = [], []
    for padded in "01":
        monkeypatch.setenv("LLAMA_STEP_PAD", padded)
        out = tmp_path / f"{padded}.npz"
        found.append(rows(libraries["patched"], nano_gguf("F32"), out, *options.split()))
        with np.load(out) as file:
            reused.append(int(file["reused"]))
    assert len(found[0]) > 300
    assert np.array_equal(found[0], found[1])
    assert reused[0] < reused[1], "some steps were padded to the graph of the step before"


@pytest.mark.reference
def test_masks_are_those_of_stock(libraries: dict[str, Path], patched: Path, tmp_path: Path) -> None:
    """With random cells, every mask equals the original function's."""
    library, program = libraries["patched"], tmp_path / "test-kv-mask"
    command = ["c++", "-std=c++17", "-O1", "-Iinclude", "-Iggml/include", "-o", str(program)]
    command += ["tests/test-kv-mask.cpp", f"-L{library}", "-lllama", "-lggml-base", f"-Wl,-rpath,{library}"]
    run(command, check=True, cwd=patched)
    done = run([program], check=True)
    assert re.search(r"\b[1-9]\d* masks are equal", done.stdout)


RINGS = ("mmf-tma", "gated_delta_net_chunked", "mmvq-rows", "mmvq-experts", "mmq-grouped", "mmq-repacked")
"""CUDA sources with a ring in shared memory that Hopper's copy engine fills."""


@pytest.mark.reference
@pytest.mark.parametrize("source", RINGS)
def test_a_ring_is_read_before_it_is_filled_again(patched: Path, tmp_path: Path, source: str) -> None:
    """In machine code no load from shared memory is outstanding where a barrier is told that a stage is free,
    or where a copy starts. Else the copy can overwrite what is still to be read, as it did now and then.
    """
    for tool in ("nvcc", "nvdisasm"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} on PATH")
    made = tmp_path / "kernels.cubin"
    flags = ["-std=c++17", "-arch=sm_90", "-O3", "-use_fast_math", "-w", "-DGGML_CUDA_USE_GRAPHS"]
    folders = [f"-I{folder}" for folder in ("ggml/include", "ggml/src", "ggml/src/ggml-cuda")]
    done = run(
        ["nvcc", *flags, *folders, "-cubin", f"ggml/src/ggml-cuda/{source}.cu", "-o", made], cwd=patched
    )
    if "cublas_v2.h" in done.stderr:
        pytest.skip("no headers of cuBLAS: put their folder into CPATH")
    assert done.returncode == 0, done.stderr
    code = run(["nvdisasm", "-hex", "-c", made], check=True).stdout
    assert re.search("UBLKCP|UTMALDG", code), "nothing is copied"
    assert not loads_outstanding(code)


INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);.*\n\s+/\* 0x([0-9a-f]{16}) \*/")


def loads_outstanding(code: str) -> list[str]:
    """Releases and copies in disassembled kernels (nvdisasm -hex) that do not wait for loads before them.

    An instruction sets one of six scoreboards when it is done, and waits for some: bits 46 to 48 and 52 to 57
    of its second word (Hopper).
    """
    found, pending = [], set[int]()
    for address, text, word in INSTRUCTION.findall(code):
        control = int(word, 16) >> 41
        pending -= {board for board in range(6) if control >> (11 + board) & 1}
        if re.search("SYNCS.ARRIVE|UBLKCP|UTMALDG", text) and pending:
            found.append(f"{address}: {text}")
        if (board := control >> 5 & 7) < 6 and re.search(r"\bLDSM?\b", text):
            pending.add(board)
        if text == "EXIT":
            pending.clear()
    return found


@pytest.mark.reference
def test_switches_apply_on_top(patched: Path) -> None:
    apply(PATCHES / "switches.patch", patched, "--dry-run")


REPACKING = """
#include <algorithm>
#include <cstdio>
#include <unordered_set>
#define GGML_ASSERT(x)
#define CUDA_CHECK(x) x
enum { cudaSuccess, cudaMemcpyDeviceToDevice, cudaStreamPerThread };
struct ggml_backend_cuda_buffer_context { int device = 0; std::unordered_set<const void *> repacked; };
struct ggml_backend_buffer { ggml_backend_cuda_buffer_context * context; };
struct ggml_tensor { ggml_backend_buffer * buffer; void * data; size_t nbytes; bool can; };
struct { struct { int cc; } devices[1]; } info;
auto & ggml_cuda_info() { return info; }
bool ggml_backend_buffer_is_cuda(ggml_backend_buffer *) { return true; }
void ggml_cuda_set_device(int) {}
size_t ggml_nbytes(const ggml_tensor * t) { return t->nbytes; }
int cudaMalloc(void **, size_t) { return cudaSuccess; }
int cudaGetLastError() { return 0; }
void cudaMemcpyAsync(void *, void *, size_t, int, int) {}
void cudaStreamSynchronize(int) {}
void cudaFree(void *) {}
bool ggml_cuda_can_repack(const ggml_tensor * t, int) { return t->can; }
void ggml_cuda_repack(const ggml_tensor *, char *, void *, int) {}
%s
int main() {
    ggml_backend_cuda_buffer_context context;
    ggml_backend_buffer buffer = { &context };
    int data[2];
    ggml_tensor can = { &buffer, data, 70, true }, cannot = { &buffer, data + 1, 5, false };
    ggml_tensor * both[] = { &can, &cannot };
    const size_t first = ggml_backend_cuda_repack_weights(both, 2);
    printf("%%zu %%zu", first, ggml_backend_cuda_repack_weights(both, 2));
}
"""
"""What repacks weights, on a card that computes nothing."""


def test_weights_that_are_repacked_already_are_counted_again(tmp_path: Path) -> None:
    """Else a server of a build with switches, which repacks at load, takes them for unrepacked ones."""
    code = (PATCHES.parent / "native/ggml/src/ggml-cuda/ggml-cuda-keep-copies.inc").read_text()
    pattern = r"^static size_t ggml_backend_cuda_repack_weights\(.*?^}$"
    [function] = re.findall(pattern, code, re.MULTILINE | re.DOTALL)
    (tmp_path / "repack.cpp").write_text(REPACKING % function)
    run(["g++", "-std=c++17", tmp_path / "repack.cpp", "-o", tmp_path / "repack"], check=True)
    assert run([tmp_path / "repack"], check=True).stdout == "70 70"


UPSTREAM = sorted((PATCHES / "upstream").glob("*.patch"))


@pytest.mark.parametrize("patch", UPSTREAM, ids=lambda path: path.stem)
def test_what_goes_upstream_has_a_title_and_a_row(patch: Path) -> None:
    """There is no description, since the person who sends the patch writes it."""
    header = patch.read_text().split("\ndiff --git ")[0]
    assert re.fullmatch(r"Subject: \[PATCH\] \S.*: \S.+\n", header)
    assert f"| [{patch.stem}](" in (patch.parent / "README.md").read_text()


COMPILED = re.compile(r"(src|tests|ggml/src/ggml-cpu)/.*\.cpp")
# common before ggml-cpu: both have a common.h, and tests include that of common
INCLUDED = ("include", "ggml/include", "ggml/src", "common", "ggml/src/ggml-cpu", "src", "vendor", "tests")


@pytest.mark.reference
@pytest.mark.timeout(3600)
def test_what_includes_a_hooked_file_compiles(patched: Path) -> None:
    """libllama's sources, and those of llama.cpp's tests that the build of a wheel leaves out. CUDA is not
    compiled."""
    touched = {
        path for patch in QUEUE for path in re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)
    }
    touched |= {path.relative_to(NATIVE).as_posix() for path in NATIVE.rglob("*")}
    sources = sorted(path for path in touched if COMPILED.fullmatch(path))
    assert len(sources) > 20
    with ThreadPoolExecutor(processors()) as pool:
        for path, error in zip(sources, pool.map(partial(compiled, patched), sources), strict=True):
            assert not error, f"{path}: {error[:2000]}"


def compiled(sources: Path, path: str) -> str:
    """The compiler's errors in a source."""
    folders = [f"-I{folder}" for folder in INCLUDED]
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-fsyntax-only", "-w", *folders, path]
    done = run(command, cwd=sources)
    return done.stderr if done.returncode else ""


@pytest.mark.reference
def test_what_goes_upstream_applies_to_stock_sources(stock: Path) -> None:
    for patch in UPSTREAM:
        apply(patch, stock, "--dry-run")
