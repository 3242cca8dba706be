"""`qwen-serve setup`: choice of the build, its key in the cache, and output."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from qwen_serve.server import build_machine, cuda_wheels, llama_build, released_wheels, setup_llama
from qwen_serve.server.about import WHEELS_VARIABLE
from qwen_serve.server.llama_build import Build, SetupError, requirement
from qwen_serve.server.setup_llama import installed_key, kept_wheel, main
from tests.processes import run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of its own, with no card and no nvcc, and a cache of its own."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    monkeypatch.delenv(WHEELS_VARIABLE, raising=False)
    monkeypatch.setattr(build_machine, "NVCC", tmp_path / "none")
    return tools


def program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("card", "compiler", "asked", "expected"),
    [
        ("8.6", True, "auto", "with CUDA for compute capability 86"),
        ("9.0\n8.6\n9.0", True, "auto", "with CUDA for compute capability 86;90"),
        ("8.6", False, "auto", "for the CPU"),
        ("", True, "auto", "for the CPU"),
        ("", True, "1", "with CUDA for compute capability 86"),
        ("8.6", True, "0", "for the CPU"),
    ],
)
def test_the_build_follows_card_and_compiler(
    machine: Path, capsys: pytest.CaptureFixture[str], card: str, compiler: bool, asked: str, expected: str
) -> None:
    said = f"printf '%s\\n' '{card}'" if card else "echo 'No devices were found'; exit 6"
    program(machine, "nvidia-smi", said)
    if compiler:
        program(machine, "nvcc", "echo release 13.0")
    assert main(["--cuda", asked, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"llama-cpp-python is built {expected}" in printed
    assert ("-DGGML_CUDA=ON" in printed) == expected.startswith("with CUDA")


def test_a_card_without_its_compiler_is_said_first_and_last(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(machine, "nvidia-smi", "printf '8.6\\n'")
    assert main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    notice = setup_llama.card_without_nvcc()
    assert notice.index("make setup CUDA=pypi") < notice.index("install a CUDA toolkit")
    assert "apt install nvidia-cuda-toolkit" in notice
    assert len({len(line) for line in notice.splitlines()}) == 1
    assert printed.startswith(notice)
    assert printed.endswith(notice)
    assert printed.count(notice) == 2
    assert main(["--advise"]) == 0
    assert capsys.readouterr().out == notice
    assert main(["--cuda", "0", "--dry-run"]) == 0
    assert "no nvcc" not in capsys.readouterr().out
    program(machine, "nvcc", "echo release 13.0")
    assert main(["--advise"]) == 0
    assert capsys.readouterr().out == ""


def test_cuda_without_its_compiler_is_refused(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cuda", "1", "--dry-run"]) == 1
    assert "CUDA=1 needs nvcc" in capsys.readouterr().err


def build(
    *,
    cuda: bool = False,
    cards: str = "86",
    patched: bool = True,
    native: bool = True,
    cuda_from_wheels: bool = False,
) -> Build:
    return Build(cuda=cuda, cards=cards, patched=patched, native=native, cuda_from_wheels=cuda_from_wheels)


def unpacked_wheels(folder: Path) -> Path:
    """What pip leaves of CUDA's wheels, as far as the build looks for it; the toolkit's root."""
    root = folder / cuda_wheels.ROOT
    for name in ("bin", "include", "lib"):
        (root / name).mkdir(parents=True)
    program(root / "bin", "nvcc", "echo release 13.0")
    for name in ("libcublas.so.13", "libnvrtc-builtins.so.13.0", "libcudart_static.a"):
        (root / "lib" / name).touch()
    header = "#define cuMemAlloc cuMemAlloc_v2\nCUresult CUDAAPI cuInit(unsigned int Flags);\n"
    (root / "include" / "cuda.h").write_text(header)
    return root


def test_a_toolkit_is_made_of_wheels(tmp_path: Path) -> None:
    root = unpacked_wheels(tmp_path)
    cuda_wheels.complete(tmp_path)
    links = {path.name: str(path.readlink()) for path in (root / "lib").iterdir() if path.is_symlink()}
    assert links == {
        "libcublas.so": "libcublas.so.13",
        "libnvrtc-builtins.so": "libnvrtc-builtins.so.13.0",
    }
    stubs = root / "lib64" / "stubs"
    assert [path.name for path in stubs.iterdir()] == ["libcuda.so"], (
        "no libcuda.so.1 to be loaded by mistake"
    )
    (tmp_path / "a.c").write_text(
        "int cuInit(unsigned); int cuMemAlloc_v2(void); int main(void) { return cuInit(0); }"
    )
    subprocess.run(
        ["cc", "-o", str(tmp_path / "a"), str(tmp_path / "a.c"), f"-L{stubs}", "-lcuda"], check=True
    )
    needed = run(["readelf", "-d", str(tmp_path / "a")], check=True)
    assert "[libcuda.so.1]" in needed.stdout


def test_wheels_of_cuda_are_fetched_once_and_whole(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def pip(*arguments: str) -> None:
        fetched.append(arguments[-1])
        unpacked_wheels(Path(arguments[arguments.index("--target") + 1]))

    monkeypatch.setattr(setup_llama, "pip", pip)
    program(machine, "broken", "echo why it failed >&2; exit 1")
    monkeypatch.setenv("CC", "broken")
    with pytest.raises(SetupError, match="libcuda failed to compile:\nwhy it failed"):
        setup_llama.fetch_cuda()
    assert not list((tmp_path / "cache" / "cuda").glob("**/nvidia"))
    monkeypatch.delenv("CC")
    setup_llama.fetch_cuda()
    setup_llama.fetch_cuda()
    assert fetched == [cuda_wheels.TOOLKIT] * 2
    assert cuda_wheels.nvcc().is_file()
    assert (cuda_wheels.folder() / cuda_wheels.ROOT / "lib" / "stubs" / "libcuda.so").is_file()
    assert [path.name for path in (tmp_path / "cache" / "cuda").iterdir()] == [cuda_wheels.folder().name]


def test_the_toolkit_of_wheels_is_what_cmake_takes(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(machine, "nvcc", "echo release 12.0")
    assert main(["--cuda", "pypi", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    root = cuda_wheels.folder() / "nvidia" / "cu13"
    assert f"-DCMAKE_CUDA_COMPILER={root}/bin/nvcc" in printed
    assert f"-DCUDAToolkit_ROOT={root}" in printed
    assert f"-rpath-link,{root}/lib64/stubs" in printed
    assert "-DLLAMA_CUDA_LIBRARIES=../../nvidia/cu13/lib" in printed
    assert not root.exists(), "a dry run fetches nothing"


def test_a_toolkit_of_the_system_is_the_one_around_its_compiler(machine: Path, tmp_path: Path) -> None:
    toolkit = tmp_path / "cuda-12.8" / "bin"
    toolkit.mkdir(parents=True)
    program(toolkit, "nvcc", "echo release 12.8")
    (machine / "nvcc").symlink_to(toolkit / "nvcc")
    args = build(cuda=True).cmake_args
    assert f"-DCUDAToolkit_ROOT={toolkit.parent}" in args
    assert not any("LLAMA_CUDA_LIBRARIES" in arg for arg in args)
    program(toolkit, "ccache", "echo release 12.8")
    (machine / "nvcc").unlink()
    (toolkit / "nvcc").unlink()
    (machine / "nvcc").symlink_to(toolkit / "ccache")
    assert not any("CUDAToolkit_ROOT" in arg for arg in build(cuda=True).cmake_args)


def test_the_key_of_a_build_from_wheels_names_them_and_no_folder(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(machine, "nvcc", "echo release 13.0")
    here = build(cuda=True, cuda_from_wheels=True)
    key = here.key
    assert here.parts["nvcc"] == cuda_wheels.TOOLKIT
    assert str(tmp_path) not in str(here.parts)
    assert key != build(cuda=True).key
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path / "elsewhere"))
    assert build(cuda=True, cuda_from_wheels=True).key == key
    monkeypatch.setattr(cuda_wheels, "TOOLKIT", "cuda-toolkit==13.1")
    assert build(cuda=True, cuda_from_wheels=True).key != key


def test_what_was_built_from_wheels_is_installed_with_their_libraries(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = Path("a.whl")
    installed: list[str] = []
    monkeypatch.setattr(setup_llama, "installed_key", lambda: None)
    monkeypatch.setattr(setup_llama, "kept_wheel", lambda build: wheel)
    monkeypatch.setattr(setup_llama, "install", lambda *what: installed.append(what[-1]))
    assert main(["--cuda", "pypi"]) == 0
    assert installed == [cuda_wheels.RUNTIME, "a.whl"]
    installed.clear()
    assert main(["--cuda", "0"]) == 0
    assert installed == ["a.whl"]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_the_built_library_looks_for_cuda_in_the_environment(tmp_path: Path) -> None:
    """In the folders of CUDA 12's wheels, which are two; those of CUDA 13 have one."""
    (tmp_path / "a.c").write_text("int a(void) { return 1; }\n")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\n"
        "project(llama_cpp LANGUAGES C)\n"
        "add_library(ggml-cuda SHARED a.c)\n"
        'set_target_properties(ggml-cuda PROPERTIES INSTALL_RPATH "$ORIGIN" BUILD_WITH_INSTALL_RPATH TRUE)\n'
    )
    args = [
        f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={ROOT / 'patches' / 'libllama.cmake'}",
        f"-DLLAMA_CUDA_LIBRARIES={released_wheels.CUDA_LIBRARIES}",
    ]
    for command in (
        ["-S", str(tmp_path), "-B", str(tmp_path / "b"), *args],
        ["--build", str(tmp_path / "b")],
    ):
        subprocess.run(["cmake", *command], check=True, capture_output=True)
    made = tmp_path / "b" / "libggml-cuda.so"
    said = run(["readelf", "-d", str(made)], check=True).stdout
    assert "[$ORIGIN:$ORIGIN/../../nvidia/cuda_runtime/lib:$ORIGIN/../../nvidia/cublas/lib]" in said


def test_a_card_that_cuda_13_does_not_know_is_refused(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(machine, "nvidia-smi", "printf '6.1\\n8.6\\n'")
    assert main(["--cuda", "pypi", "--dry-run"]) == 1
    said = capsys.readouterr().err
    assert "supports cards of compute capability 75 and later, not 61: install a CUDA 12 toolkit" in said
    assert main(["--cuda", "pypi", "--cuda-archs", "86;120a-real", "--dry-run"]) == 0
    assert "CUDA=pypi" not in setup_llama.card_without_nvcc()
    unpacked_wheels(cuda_wheels.folder())
    capsys.readouterr()
    assert main(["--dry-run"]) == 0
    assert "built for the CPU" in capsys.readouterr().out


def test_later_builds_take_the_toolkit_that_was_fetched(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make serve` after `make setup CUDA=pypi` is no build for the CPU."""
    program(machine, "nvidia-smi", "printf '8.6\\n'")
    unpacked_wheels(cuda_wheels.folder())
    assert main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("llama-cpp-python is built with CUDA for compute capability 86")
    assert build(cuda=True, cuda_from_wheels=True).key in printed


def test_what_differs_has_another_key(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(machine, "nvcc", "echo release 13.0")
    builds = [
        build(),
        build(patched=False),
        build(native=False),
        build(cuda=True),
        build(cuda=True, cards="86;89"),
    ]
    keys = [each.key for each in builds]
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_OPENMP=OFF")
    keys.append(build().key)
    program(machine, "c++", "echo c++ 99")
    keys.append(build().key)
    program(machine, "nvcc", "echo release 13.1")
    keys.append(build(cuda=True).key)
    monkeypatch.setattr(llama_build, "processor", lambda: "another")
    keys.append(build().key)
    assert len(set(keys)) == len(keys)
    assert keys[0].startswith(requirement().partition("==")[2] + "-cpu-")


OURS = (
    "patches/llama.cpp/01-a.patch",
    "patches/apply.cmake",
    "native/src/a.cpp",
    "native/src/a.h",
    "native/tests/a.inc",
    "native/ggml/src/ggml-cuda/a.cu",
    "native/ggml/src/ggml-cuda/a.cuh",
)


@pytest.mark.parametrize("changed", OURS)
def test_a_changed_byte_is_another_build_and_another_release(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    for name in OURS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    for module in (llama_build, released_wheels):
        monkeypatch.setattr(module, "data_folder", lambda name: tmp_path / name)

    def keys() -> set[str]:
        return {build().key, released_wheels.Released.named("cpu-x86_64").key}

    first = keys()
    (tmp_path / "native" / "notes.md").write_text("nothing that is compiled")
    assert keys() == first
    (tmp_path / changed).write_text("b")
    assert not keys() & first


def test_a_kept_wheel_is_taken_from_a_folder_that_nobody_may_write(machine: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "cache" / "wheels" / build().key / "llama_cpp_python-1-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    wheel.parent.parent.chmod(0o555)
    assert kept_wheel(build()) == wheel
    assert not (wheel.parent.parent / ".lock").exists()


def test_a_cache_that_can_not_be_made_is_named(machine: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(SetupError, match=r"cache.*QWEN_SERVE_CACHE names another folder"):
        kept_wheel(build())


def test_stock_builds_are_no_build_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_llama, "PACKAGE", "pytest")
    assert installed_key() is None
    monkeypatch.setattr(setup_llama, "PACKAGE", "no-such-package")
    assert installed_key() is None


def test_the_pin_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirement() in project["dependencies"]


def test_what_pip_cannot_do_is_an_error() -> None:
    with pytest.raises(SetupError, match=r"pip install failed for ./no-such-file\.whl"):
        setup_llama.install("--no-index", "./no-such-file.whl")
