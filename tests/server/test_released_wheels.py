"""Wheels of a release: which one a machine takes, that it is the right one, and what happens without it."""

import hashlib
import json
import os
import platform
import re
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from qwen_serve.server import build_machine, llama_build, released_wheels, setup_llama
from qwen_serve.server.about import WHEELS_VARIABLE
from qwen_serve.server.llama_build import SetupError
from qwen_serve.server.released_wheels import KINDS, NoWheel, Released, fetch, fitting, listed
from tests.http_server import serving
from tests.processes import run

ROOT = Path(__file__).parents[2]
AVX512 = KINDS[0].features
OWN_ENVIRONMENT = {**os.environ}
LABEL = (
    "from qwen_serve.server.released_wheels import fitting\n"
    "print(fitting(cuda='0', archs=None, patched=True, native=True).key)"
)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Linux, AVX-512, neither compiler nor card; a folder for programs, which is PATH, and a cache."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path / "cache"))
    for name in ("CMAKE_ARGS", "CXX", WHEELS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build_machine, "NVCC", tmp_path / "none")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(released_wheels, "processor_features", lambda: AVX512 | {"sse2"})
    return tools


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip is told to install; the last wheel is then what is installed."""
    given: list[str] = []
    monkeypatch.setattr(setup_llama, "install", lambda *what: given.append(what[-1]))
    key = lambda: Path(given[-1]).parent.name if given else None  # noqa: E731
    monkeypatch.setattr(setup_llama, "installed_key", key)
    return given


def card(tools: Path, capability: str, driver: str) -> None:
    script = f'#!/bin/sh\ncase "$1" in *compute_cap*) echo {capability};; *) echo {driver};; esac\n'
    (tools / "nvidia-smi").write_text(script)
    (tools / "nvidia-smi").chmod(0o755)


def release(folder: Path, *labels: str, tag: str = "py3-none-manylinux_2_28_x86_64") -> Path:
    """A release's files, listed by the script that publishes them."""
    folder.mkdir()
    for label in labels:
        (folder / f"{Released.named(label).key}.{tag}.whl").write_text(f"the wheel {label}")
    run([str(ROOT / ".ci" / "publish"), "", str(folder)], env={"PATH": "/usr/bin:/bin"}, check=True)
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of `tmp_path`, over HTTP."""
    with serving(partial(Quiet, directory=str(tmp_path))) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def ask(**asked: object) -> Released:
    defaults = {"cuda": "auto", "archs": None, "patched": True, "native": True}
    return fitting(**{**defaults, **asked})  # type: ignore[arg-type]


def test_the_processor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask().label == "cpu-x86_64-avx512"
    assert ask(native=False).label == "cpu-x86_64"
    monkeypatch.setattr(released_wheels, "processor_features", lambda: AVX512 - {"avx512_vnni"})
    assert ask().label == "cpu-x86_64"
    monkeypatch.setattr(released_wheels, "processor_features", lambda: AVX512 - {"avx2"})
    with pytest.raises(NoWheel, match="none for this x86_64 processor"):
        ask()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(released_wheels, "processor_features", lambda: frozenset({"asimdhp", "asimddp"}))
    assert ask().label == "cpu-aarch64"
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert ask().label == "metal-arm64"


def test_the_card_decides(machine: Path) -> None:
    card(machine, "8.6", "570.1")
    assert ask().label == "cuda-86-x86_64", "no compiler of CUDA is needed"
    assert ask(cuda="0").label == "cpu-x86_64-avx512"
    assert ask(archs="90").label == "cuda-90-x86_64"
    with pytest.raises(NoWheel, match="one compute capability each, not 86;89"):
        ask(archs="86;89")
    card(machine, "8.6", "470.2")
    with pytest.raises(NoWheel, match="driver of 525 or later, not 470"):
        ask()


@pytest.mark.parametrize("asked", [{"patched": False}, {"cuda": "1"}])
def test_what_no_release_has_is_built(asked: dict[str, object]) -> None:
    with pytest.raises(NoWheel):
        ask(**asked)


def test_own_options_of_cmake_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_OPENMP=OFF")
    with pytest.raises(NoWheel, match="CMAKE_ARGS"):
        ask()


def test_names_say_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another patch, processor, card or system is another name; another compiler here is not."""
    labels = ["cpu-x86_64", "cpu-x86_64-avx512", "cuda-86-x86_64", "cuda-90-x86_64", "cpu-aarch64"]
    keys = {Released.named(label).key for label in labels}
    assert len(keys) == len(labels)
    before = Released.named("cpu-x86_64").key
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    assert Released.named("cpu-x86_64").key == before
    (tmp_path / "patches" / "llama.cpp").mkdir(parents=True)
    (tmp_path / "patches" / "llama.cpp" / "01-a.patch").write_text("a")
    monkeypatch.setattr(llama_build, "data_folder", lambda name: tmp_path / name)
    assert Released.named("cpu-x86_64").key != before


@pytest.mark.parametrize("label", ["cpu-mips", "x86_64", "metal-x86_64", "cuda-x86_64", "cpu-cuda-86"])
def test_a_label_that_is_none_is_refused(label: str) -> None:
    with pytest.raises(SetupError, match="want cpu-KIND"):
        Released.named(label)


def test_a_cuda_build_of_a_release_needs_its_compiler(machine: Path) -> None:
    with pytest.raises(SetupError, match=r"CUDA 12\.8's nvcc"):
        _ = Released.named("cuda-86-x86_64").cmake_args
    (machine / "nvcc").write_text("#!/bin/sh\necho release 12.8\n")
    (machine / "nvcc").chmod(0o755)
    args = Released.named("cuda-86-x86_64").cmake_args
    assert {"-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=86", "-DGGML_NATIVE=OFF"} <= set(args)


@pytest.mark.parametrize("over", ["http", "folder", "file"])
def test_it_is_taken_over_http_and_from_a_folder(
    tmp_path: Path, served: str, over: str, installed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = release(tmp_path / "wheels", "cpu-x86_64-avx512", "cpu-x86_64")
    where = {"http": f"{served}/wheels/", "folder": str(folder), "file": folder.as_uri()}[over]
    assert setup_llama.main(["--wheels", where]) == 0
    key = Released.named("cpu-x86_64-avx512").key
    assert f"taken instead of building: {key} of {where}" in capsys.readouterr().out
    (wheel,) = map(Path, installed)
    assert wheel.read_text() == "the wheel cpu-x86_64-avx512"
    assert wheel.parent == tmp_path / "cache" / "wheels" / key
    version = llama_build.requirement().partition("==")[2]
    assert wheel.name == f"llama_cpp_python-{version}-py3-none-manylinux_2_28_x86_64.whl"
    (folder / "SHA256SUMS").unlink()
    assert setup_llama.main(["--wheels", where]) == 0, "it is there"
    assert len(installed) == 1


def test_the_variable_names_the_place_and_an_empty_flag_none(
    tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(WHEELS_VARIABLE, str(release(tmp_path / "wheels", "cpu-x86_64-avx512")))
    assert setup_llama.main(["--wheels", ""]) == 1
    assert "no C++ compiler" in capsys.readouterr().err
    assert setup_llama.main(["--dry-run"]) == 0
    assert "would take" in capsys.readouterr().out
    assert not installed
    assert setup_llama.main([]) == 0
    assert len(installed) == 1


def test_a_card_without_its_compiler_is_used(
    machine: Path, tmp_path: Path, installed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is said of a compiler that is missing."""
    card(machine, "8.6", "570.1")
    where = str(release(tmp_path / "wheels", "cuda-86-x86_64"))
    assert setup_llama.main(["--wheels", where]) == 0
    assert installed[0] == released_wheels.CUDA_RUNTIME
    assert Path(installed[1]).read_text() == "the wheel cuda-86-x86_64"
    assert setup_llama.main(["--wheels", where, "--advise"]) == 0
    assert "nvcc" not in capsys.readouterr().out


def test_what_was_built_here_stays(
    tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = llama_build.Build(cuda=False, cards="86", patched=True, native=True)
    kept = tmp_path / "cache" / "wheels" / own.key / "llama_cpp_python-1-py3-none-any.whl"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert setup_llama.main(["--wheels", str(release(tmp_path / "wheels", "cpu-x86_64-avx512"))]) == 0
    assert installed == [str(kept)]


def test_a_wheel_of_other_patches_does_not_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = release(tmp_path / "wheels", "cpu-x86_64-avx512")
    monkeypatch.setattr(released_wheels, "sources_digest", lambda: "another")
    assert setup_llama.main(["--wheels", str(where)]) == 1
    said = capsys.readouterr()
    assert f"no ready-made wheel: {where} has no {ask().key}\n" in said.out
    assert "no C++ compiler" in said.err


@pytest.mark.parametrize("libc", [("glibc", "2.27"), ("", ""), ("musl", "1.2")])
def test_a_wheel_for_a_newer_system_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libc: tuple[str, str]
) -> None:
    where = str(release(tmp_path / "wheels", "cpu-x86_64-avx512"))
    assert listed(ask(), where)[1] == "py3-none-manylinux_2_28_x86_64"
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    with pytest.raises(NoWheel, match="wants a newer system than this"):
        listed(ask(), where)


def test_a_wheel_of_another_checksum_is_not_taken(tmp_path: Path) -> None:
    folder = release(tmp_path / "wheels", "cpu-x86_64-avx512")
    (wheel,) = folder.glob("*.whl")
    wheel.write_text("another")
    with pytest.raises(NoWheel, match="another checksum"):
        fetch(ask(), str(folder))
    assert not list((tmp_path / "cache").rglob("*.whl"))


class Silent(BaseHTTPRequestHandler):
    """Begins to answer and goes on, a byte at a time, for ever."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        while not self.server.stop.wait(0.05):  # type: ignore[attr-defined]
            self.wfile.write(b"#")

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_never_ends_its_answer_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released_wheels, "ANSWER_S", 0.3)
    with serving(Silent) as server:
        server.stop = threading.Event()  # type: ignore[attr-defined]
        with pytest.raises(NoWheel, match=r"SHA256SUMS of .*: no answer in time"):
            listed(ask(), f"http://127.0.0.1:{server.server_port}")
        server.stop.set()  # type: ignore[attr-defined]


def test_what_is_not_reached_is_said_in_a_line(tmp_path: Path, served: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
    for where, why in (
        (f"{served}/none", "404"),
        (f"http://127.0.0.1:{closed}", "Connection refused"),
        (str(tmp_path / "none"), "No such file"),
        ("http://[", "Invalid IPv6"),
    ):
        with pytest.raises(NoWheel, match=why) as raised:
            listed(ask(), where)
        assert len(str(raised.value).splitlines()) == 1
    assert released_wheels.shown("https://me:secret@host/a@b") == "https://host/a@b"


def test_publishing_makes_a_release_once(tmp_path: Path) -> None:
    """With a stand-in for gh that writes down its arguments and the notes that it reads."""
    tools, folder = tmp_path / "tools", release(tmp_path / "wheels", "cpu-x86_64")
    tools.mkdir()
    for status in (1, 0):
        (tools / "gh").write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ "$2" = view ] && exit {status}\n'
            f'[ "$2" = create ] && cat > {tmp_path}/notes\nexit 0\n'
        )
        (tools / "gh").chmod(0o755)
        command = [str(ROOT / ".ci" / "publish"), "v0.2.0", str(folder)]
        environment = {"PATH": f"{tools}:/usr/bin:/bin", "GITHUB_REPOSITORY": "owner/name"}
        run(command, env=environment, check=True)
    asked = [line.split()[:3] for line in (tmp_path / "asked").read_text().splitlines()]
    assert [words[1] for words in asked] == ["view", "create", "upload", "view", "upload"]
    assert {words[2] for words in asked} == {"v0.2.0"}
    notes = (tmp_path / "notes").read_text()
    assert notes.lstrip().startswith("Pictures, LoRA adapters")
    assert "](https://github.com/owner/name/blob/v0.2.0/docs/benchmarks.md)" in notes
    assert "\n## " not in notes
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert (folder / "SHA256SUMS").read_text().split() == [digest, wheel.name]
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run([str(ROOT / ".ci" / "publish"), "", str(empty)], env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 1
    assert "has no wheel" in done.stderr
    done = run([str(ROOT / ".ci" / "publish"), "v0.0", str(folder)], env=environment)
    assert done.returncode == 1
    assert "CHANGELOG.md has no section for 0.0" in done.stderr


@pytest.mark.slow
def test_a_machine_without_a_compiler_answers(tmp_path: Path, served: str) -> None:
    """The steps of the workflow, with the build that this environment has in place of a release's."""
    record = distribution(llama_build.PACKAGE).read_text("direct_url.json")
    kept = Path(unquote(urlparse(json.loads(record or '{"url": ""}')["url"]).path))
    if kept.suffix != ".whl" or not kept.is_file():
        pytest.skip("llama-cpp-python was not built by qwen-serve setup, or its wheel is gone")
    # the machine's own processor and system: the build is for these
    build = run([sys.executable, "-c", LABEL], cwd=ROOT, check=True, env=OWN_ENVIRONMENT).stdout.strip()
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / f"{build}.py3-none-any.whl").write_bytes(kept.read_bytes())
    run(
        [str(ROOT / ".ci" / "publish"), "", str(tmp_path / "wheels")],
        env={"PATH": "/usr/bin:/bin"},
        check=True,
    )

    def left(folder: str, names: list[str]) -> set[str]:
        of_root = ("build", "tests", "docs") if Path(folder) == ROOT else ()
        return shutil.ignore_patterns(".*", "*.gguf", *of_root)(folder, names)

    checkout = shutil.copytree(ROOT, tmp_path / "checkout", symlinks=True, ignore=left)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w"]
    run([*pip, str(tmp_path / "own"), str(checkout)], check=True, env=OWN_ENVIRONMENT)
    (own,) = (tmp_path / "own").glob("*.whl")
    command = [sys.executable, str(ROOT / ".ci" / "try-wheels"), f"{served}/wheels", str(own)]
    done = run([*command, str(tmp_path / "new")], env=OWN_ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "taken instead of building" in done.stdout
    told = re.search(r"first answer .+ s after pip install, ([\d.]+) s of the processor", done.stdout)
    assert told, done.stdout
    assert float(told[1]) < 60, "a minute, if nothing else runs and downloads take no time"
