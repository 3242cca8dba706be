"""llama.cpp's programs are built once, for this machine, from the pinned package's sources."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.servers import builds
from qwen_serve.bench.servers.builds import build_programs, this_machines_flavour
from qwen_serve.server import build_machine, llama_build

CMAKE = """#!/bin/sh
PATH=/usr/bin:/bin
echo "$@" >> {log}
[ "$1" = --build ] || exit {status}
while [ "$1" != --target ]; do shift; done
shift
mkdir -p "{bin}"
for name; do touch "{bin}/$name"; done
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The unpacked sdist, with a cmake on PATH that builds empty programs."""
    made = tmp_path / "cache" / f"llama_cpp_python-{version('llama-cpp-python')}"
    for tool, text in (
        ("server", "set(TARGET llama-server-impl)\nadd_executable(llama-server main.cpp)"),
        ("llama-bench", "set(TARGET llama-bench)"),
    ):
        (made / "vendor" / "llama.cpp" / "tools" / tool).mkdir(parents=True)
        (made / "vendor" / "llama.cpp" / "tools" / tool / "CMakeLists.txt").write_text(text)
    monkeypatch.setattr(builds, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(build_machine, "NVCC", Path("/no/nvcc"))
    monkeypatch.setenv("PATCHES", "0")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))  # nothing else
    program(tmp_path, "cmake", CMAKE.format(log=tmp_path / "log", bin=made / "build" / "bin", status=0))
    return made


def program(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "path").mkdir(exist_ok=True)
    (tmp_path / "path" / name).write_text(text)
    (tmp_path / "path" / name).chmod(0o755)


def test_built_once(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert build_programs(["llama-server", "llama-bench"]) == root / "build" / "bin"
    configure, build = (tmp_path / "log").read_text().splitlines()
    assert f"-S {root / 'vendor' / 'llama.cpp'}" in configure
    assert "-DGGML_CUDA=OFF" in configure
    assert "-DLLAMA_PATCHES=OFF" in configure
    assert build.endswith("--target llama-server llama-bench")
    assert "building llama-server, llama-bench (cpu): some minutes, once" in capfd.readouterr().err
    build_programs(["llama-server"])
    assert len((tmp_path / "log").read_text().splitlines()) == 2, "it is there"


def test_the_verb_prints_the_folder(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "llama-server", "--flavour", "cpu"]) == 0
    assert capfd.readouterr().out == f"{root / 'build' / 'bin'}\n"


@pytest.mark.parametrize("name", ["llama-server,llama-bench", "a,b", "llama-server-impl", "server"])
def test_what_is_no_program_is_refused_by_name(
    name: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "llama-bench", name]) == 1
    assert (
        f"{name}: no program of llama.cpp; there are llama-bench, llama-server\n" in capsys.readouterr().err
    )
    assert not (tmp_path / "log").exists(), "nothing is built"


def test_patched_programs_have_a_folder_for_each_queue_and_kernel(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, kernel = tmp_path / "patches" / "llama.cpp" / "01-one.patch", tmp_path / "native" / "a" / "one.cu"
    for path in (patch, kernel):
        path.parent.mkdir(parents=True)
        path.write_text("one")
    for module in (builds, llama_build):
        monkeypatch.setattr(module, "data_folder", lambda name: tmp_path / name)
    monkeypatch.setenv("PATCHES", "1")
    build_programs(["llama-server"])  # (the stand-in for cmake fills build/bin only, which is another)
    for path in (patch, kernel):
        path.write_text("two")
        build_programs(["llama-server"])
    configured = (tmp_path / "log").read_text().splitlines()[::2]
    folders = {re.search(r"-B (\S+)", line).group(1) for line in configured}  # type: ignore[union-attr]
    assert len(folders) == 3
    assert str(root / "build") not in folders
    assert all(f"-DCMAKE_PROJECT_INCLUDE={tmp_path}/patches/apply.cmake" in line for line in configured)
    assert all("-DLLAMA_PATCHES=ON" in line for line in configured)


def test_a_build_that_fails(root: Path, tmp_path: Path) -> None:
    program(tmp_path, "cmake", CMAKE.format(log=tmp_path / "log", bin="/no", status=3))
    with pytest.raises(BenchError, match=r"cmake -S .* ended with status 3"):
        build_programs(["llama-server"])


def test_without_cmake(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no")
    with pytest.raises(BenchError, match="cmake is needed"):
        build_programs(["llama-server"])


def test_cuda_where_there_is_a_card_and_its_compiler(root: Path, tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "#!/bin/sh\necho 9.0\necho 8.6\n")
    assert this_machines_flavour() == "cpu", "no compiler"
    program(tmp_path, "nvcc", "#!/bin/sh\n")
    assert this_machines_flavour() == "cuda"
    assert build_programs(["llama-server"], "cuda") == root / "build-cuda" / "bin"
    configure = (tmp_path / "log").read_text().splitlines()[0]
    assert "-DCMAKE_CUDA_ARCHITECTURES=86;90" in configure
    assert f"-DCMAKE_CUDA_COMPILER={tmp_path / 'path' / 'nvcc'}" in configure
    program(tmp_path, "nvidia-smi", "#!/bin/sh\nexit 9\n")
    assert this_machines_flavour() == "cpu", "no card"
