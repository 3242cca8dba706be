"""patches/apply.cmake on sources of a few lines: patches are applied, removed, refused by name; libllama
lists their changes; our own sources are compiled into llama.cpp's targets."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run

APPLY = Path(__file__).parents[2] / "patches" / "apply.cmake"

PROJECT = """
cmake_minimum_required(VERSION 3.21)
project(llama.cpp CXX)
add_subdirectory(src)
if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/ggml)
    add_subdirectory(ggml/src/ggml-hip)
endif()
"""
LIBRARY = """
project(inner CXX)
add_library(llama SHARED llama.cpp)
set_target_properties(llama PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR} UNITY_BUILD ON)
"""
HIP = """
file(GLOB sources ../ggml-cuda/*.cu)
set_source_files_properties(${sources} PROPERTIES LANGUAGE CXX COMPILE_FLAGS "-x c++ -DSEVEN=7")
add_library(ggml-hip SHARED ${sources})
set_target_properties(ggml-hip PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
"""
RUNTIME = """
add_library(runtime STATIC runtime.cpp)
set_target_properties(runtime PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_sources(llama PRIVATE five.cpp)
target_link_libraries(llama PRIVATE runtime)
"""
SOURCE = """extern "C" int one(void) { return 1; }
// between
extern "C" int two(void) { return 2; }
"""
ONE = """What and why.

Changes: one

--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -1,3 +1,3 @@
-extern "C" int one(void) { return 1; }
+extern "C" int one(void) { return 11; }
 // between
 extern "C" int two(void) { return 2; }
"""
TWO = """What and why.

Changes: two-a two-b

--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -1,3 +1,3 @@
 extern "C" int one(void) { return 11; }
 // between
-extern "C" int two(void) { return 2; }
+extern "C" int two(void) { return 22; }
--- /dev/null
+++ b/src/new.h
@@ -0,0 +1 @@
+// new
"""


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    """A queue of two patches beside a copy of apply.cmake, without own sources."""
    made = tmp_path / "patches" / "llama.cpp"
    made.mkdir(parents=True)
    for name in ("apply.cmake", "native.cmake"):
        shutil.copy(APPLY.with_name(name), made.parent)
    (made / "01-one.patch").write_text(ONE)
    (made / "02-two.patch").write_text(TWO)
    return made


@pytest.fixture(params=["llama.cpp", "llama-cpp-python"])
def sources(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The project to configure: llama.cpp itself, or one that vendors it."""
    root = tmp_path / "project"
    inner = root if request.param == "llama.cpp" else root / "vendor" / "llama.cpp"
    (inner / "src").mkdir(parents=True)
    (inner / "CMakeLists.txt").write_text(PROJECT)
    (inner / "src" / "CMakeLists.txt").write_text(LIBRARY)
    (inner / "src" / "llama.cpp").write_text(SOURCE)
    if inner != root:
        outer = (
            "cmake_minimum_required(VERSION 3.21)\nproject(llama_cpp)\nadd_subdirectory(vendor/llama.cpp)\n"
        )
        (root / "CMakeLists.txt").write_text(outer)
    return inner


def configure(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = ["cmake", "-S", tmp_path / "project", "-B", tmp_path / "build", *options]
    command.append(f"-DCMAKE_PROJECT_INCLUDE={tmp_path / 'patches' / 'apply.cmake'}")
    return run(command)


def built(tmp_path: Path, name: str = "llama") -> ctypes.CDLL:
    """The current library, under a new name each time, since a loaded library is not loaded again."""
    subprocess.run(["cmake", "--build", tmp_path / "build"], check=True, capture_output=True)
    library = next((tmp_path / "build").glob(f"lib{name}.*"))
    copy = tmp_path / f"{len(list(tmp_path.iterdir()))}-{library.name}"
    shutil.copy(library, copy)
    return ctypes.CDLL(str(copy))


def told(library: ctypes.CDLL) -> bytes:
    library.llama_patches.restype = ctypes.c_char_p
    names: bytes = library.llama_patches()
    return names


def test_applied_and_told(tmp_path: Path, queue: Path, sources: Path) -> None:
    assert "llama.cpp's patches: 01-one 02-two" in configure(tmp_path).stdout
    library = built(tmp_path)
    assert (library.one(), library.two()) == (11, 22)
    assert told(library) == b"one two-a two-b"
    assert (sources / "src" / "new.h").exists()
    assert configure(tmp_path).returncode == 0, "again, on sources that have them"


def test_off_takes_them_back(tmp_path: Path, queue: Path, sources: Path) -> None:
    configure(tmp_path)
    assert configure(tmp_path, "-DLLAMA_PATCHES=OFF").returncode == 0
    assert (sources / "src" / "llama.cpp").read_text() == SOURCE
    assert not (sources / "src" / "new.h").exists()
    library = built(tmp_path)
    assert (library.one(), library.two()) == (1, 2)
    assert not hasattr(library, "llama_patches")


def test_another_queue_replaces_the_first(tmp_path: Path, queue: Path, sources: Path) -> None:
    configure(tmp_path)
    (queue / "02-two.patch").unlink()
    (queue / "01-one.patch").write_text(ONE.replace("11", "111"))
    done = configure(tmp_path)
    assert done.returncode == 0, done.stderr
    library = built(tmp_path)
    assert (library.one(), library.two()) == (111, 2)
    assert told(library) == b"one"


def test_one_that_does_not_apply_is_named(tmp_path: Path, queue: Path, sources: Path) -> None:
    (queue / "02-two.patch").write_text(TWO.replace("// between", "// elsewhere"))
    done = configure(tmp_path)
    assert done.returncode != 0
    assert "the patch 02-two does not apply" in " ".join(done.stderr.split())
    (queue / "02-two.patch").write_text(TWO)
    done = configure(tmp_path)
    assert done.returncode == 0, f"mended: {done.stderr}"
    assert told(built(tmp_path)) == b"one two-a two-b"


def test_sources_changed_by_hand_are_named(tmp_path: Path, queue: Path, sources: Path) -> None:
    configure(tmp_path)
    (sources / "src" / "llama.cpp").write_text("// mine\n")
    done = configure(tmp_path, "-DLLAMA_PATCHES=OFF")
    assert done.returncode != 0
    assert "delete that folder" in " ".join(done.stderr.split())


@pytest.mark.skipif(sys.platform != "linux", reason="only linkers of ELF have --exclude-libs")
def test_libraries_do_not_export_what_static_ones_bring(tmp_path: Path, queue: Path, sources: Path) -> None:
    """A static libstdc++.a would, if a compiler lacks libstdc++.so."""
    src = sources / "src"
    (src / "CMakeLists.txt").write_text(LIBRARY + RUNTIME)
    (src / "runtime.cpp").write_text('extern "C" int runtime(void) { return 5; }\n')
    calling = 'extern "C" int runtime(void);\nextern "C" int five(void) { return runtime(); }\n'
    (src / "five.cpp").write_text(calling)
    assert configure(tmp_path).returncode == 0
    library = built(tmp_path)
    assert library.five() == 5
    assert not hasattr(library, "runtime")


HOOK = """Changes: hook

--- a/ggml/src/ggml-cuda/ggml-cuda.cu
+++ b/ggml/src/ggml-cuda/ggml-cuda.cu
@@ -1 +1,2 @@
-extern "C" int kernel(void) { return 1; }
+#include "ggml-cuda/own.cuh"
+extern "C" int kernel(void) { return own() + ours(); }
"""
OWN = {
    "ggml/src/ggml-cuda/own.cuh": "int own(void);\nint ours(void);\n",
    "ggml/src/ggml-cuda/own.cu": (
        '#include "upstream.cuh"\n#include "own.cuh"\nint own(void) { return SEVEN * UPSTREAM; }\n'
    ),
    "ggml/src/ggml-cuda/other.cu": '#include "own.cuh"\nint ours(void) { return 1; }\n',
    "src/own.cpp": (
        '#include "own.h"\nstatic int hidden(void) { return 5; }\nint own(void) { return hidden(); }\n'
    ),
    "src/other.cpp": 'static int hidden(void) { return 6; }\nextern "C" int six(void) { return hidden(); }\n',
    "src/own.h": 'extern "C" int own(void);\n',
}


@pytest.fixture
def native(tmp_path: Path, queue: Path, sources: Path) -> Path:
    """Own sources, with a hook into those of llama.cpp's backend for AMD: each file there has its own
    language and flags."""
    kernels = sources / "ggml" / "src" / "ggml-cuda"
    kernels.mkdir(parents=True)
    kernels.with_name("ggml-hip").mkdir()
    kernels.with_name("ggml-hip").joinpath("CMakeLists.txt").write_text(HIP)
    (kernels / "ggml-cuda.cu").write_text('extern "C" int kernel(void) { return 1; }\n')
    (kernels / "upstream.cuh").write_text("#define UPSTREAM 10\n")
    (queue / "03-hook.patch").write_text(HOOK)
    for name, text in OWN.items():
        path = tmp_path / "native" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "native"


def test_own_sources_are_compiled_into_the_same_targets(tmp_path: Path, native: Path) -> None:
    done = configure(tmp_path)
    assert done.returncode == 0, done.stderr
    library = built(tmp_path)
    assert (library.own(), library.six(), library.two()) == (5, 6, 22), "each file by itself"
    assert told(library) == b"one two-a two-b hook"
    assert built(tmp_path, "ggml-hip").kernel() == 71
    configure(tmp_path, "-DLLAMA_PATCHES=OFF")
    assert not hasattr(built(tmp_path), "own")
    assert built(tmp_path, "ggml-hip").kernel() == 1


def test_an_edit_of_an_own_source_recompiles_that_source_alone(tmp_path: Path, native: Path) -> None:
    configure(tmp_path)
    assert built(tmp_path, "ggml-hip").kernel() == 71
    before = objects(tmp_path)
    kernel = native / "ggml/src/ggml-cuda/own.cu"
    kernel.write_text(kernel.read_text().replace("SEVEN *", "SEVEN * 10 *"))
    assert built(tmp_path, "ggml-hip").kernel() == 701
    after = objects(tmp_path)
    assert [Path(name).name for name in after if after[name] != before[name]] == ["own.cu.o"]


def test_a_new_own_source_is_compiled_without_being_named(tmp_path: Path, native: Path) -> None:
    configure(tmp_path)
    built(tmp_path)
    (native / "src" / "new.cpp").write_text('extern "C" int added(void) { return 8; }\n')
    assert built(tmp_path).added() == 8


def objects(tmp_path: Path) -> dict[str, int]:
    """When each object was made."""
    return {str(path): path.stat().st_mtime_ns for path in (tmp_path / "build").rglob("*.o")}
