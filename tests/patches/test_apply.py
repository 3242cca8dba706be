"""patches/apply.cmake on sources of a few lines: patches are applied, removed, refused by name, and listed by
libllama."""

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
"""
LIBRARY = """
project(inner CXX)
add_library(llama SHARED llama.cpp)
set_target_properties(llama PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
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

--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -1,3 +1,3 @@
-extern "C" int one(void) { return 1; }
+extern "C" int one(void) { return 11; }
 // between
 extern "C" int two(void) { return 2; }
"""
TWO = """What and why.

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
    """A queue of two patches beside a copy of apply.cmake."""
    made = tmp_path / "patches" / "llama.cpp"
    made.mkdir(parents=True)
    shutil.copy(APPLY, made.parent)
    (made / "0001-one.patch").write_text(ONE)
    (made / "0002-two.patch").write_text(TWO)
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


def built(tmp_path: Path) -> ctypes.CDLL:
    """The current library, under a new name each time, since a loaded library is not loaded again."""
    subprocess.run(["cmake", "--build", tmp_path / "build"], check=True, capture_output=True)
    library = next((tmp_path / "build").glob("libllama.*"))
    copy = tmp_path / f"{len(list(tmp_path.iterdir()))}-{library.name}"
    shutil.copy(library, copy)
    return ctypes.CDLL(str(copy))


def told(library: ctypes.CDLL) -> bytes:
    library.llama_patches.restype = ctypes.c_char_p
    names: bytes = library.llama_patches()
    return names


def test_applied_and_told(tmp_path: Path, queue: Path, sources: Path) -> None:
    assert "llama.cpp's patches: 0001-one 0002-two" in configure(tmp_path).stdout
    library = built(tmp_path)
    assert (library.one(), library.two()) == (11, 22)
    assert told(library) == b"0001-one 0002-two"
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


def test_up_to_a_number(tmp_path: Path, queue: Path, sources: Path) -> None:
    configure(tmp_path)
    configure(tmp_path, "-DLLAMA_PATCHES_LAST=0001")
    library = built(tmp_path)
    assert (library.one(), library.two()) == (11, 2)
    assert told(library) == b"0001-one"


def test_another_queue_replaces_the_first(tmp_path: Path, queue: Path, sources: Path) -> None:
    configure(tmp_path)
    (queue / "0002-two.patch").unlink()
    (queue / "0001-one.patch").write_text(ONE.replace("11", "111"))
    done = configure(tmp_path)
    assert done.returncode == 0, done.stderr
    library = built(tmp_path)
    assert (library.one(), library.two()) == (111, 2)
    assert told(library) == b"0001-one"


def test_one_that_does_not_apply_is_named(tmp_path: Path, queue: Path, sources: Path) -> None:
    (queue / "0002-two.patch").write_text(TWO.replace("// between", "// elsewhere"))
    done = configure(tmp_path)
    assert done.returncode != 0
    assert "the patch 0002-two does not apply" in " ".join(done.stderr.split())
    (queue / "0002-two.patch").write_text(TWO)
    done = configure(tmp_path)
    assert done.returncode == 0, f"mended: {done.stderr}"
    assert told(built(tmp_path)) == b"0001-one 0002-two"


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
