"""What can be proved of the Dockerfiles and the Makefile without Docker and without a card.

tests/test_image.py goes on: it executes Dockerfile.cpu.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

import pytest

from qwen_serve.server.settings import Settings
from tests.processes import run
from tests.tree import files, paths

ROOT = Path(__file__).parent.parent
DOCKERFILES = {name: (ROOT / name).read_text() for name in ("Dockerfile.cuda", "Dockerfile.cpu")}
DOCKERFILE = DOCKERFILES["Dockerfile.cuda"]
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the image's `pip install .` fills, from just the files the Dockerfile copies.

    Built with this environment's setuptools (the extra `dev`), for which nothing has to be fetched.
    """
    context, site = tmp_path_factory.mktemp("context"), tmp_path_factory.mktemp("site")
    build_stage = DOCKERFILE.split("\nFROM ")[1]
    copied = [*re.findall(r"^COPY (.+) (\S+)$", build_stage, re.MULTILINE), ("models/nano", "models/nano")]
    for sources, target in copied:
        for source in sources.split():
            place = context / target / (Path(source).name if target.endswith("/") else "")
            place.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-rT", ROOT / source, place], check=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *OFFLINE, "--target", site, "."],
        cwd=context,
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
        check=True,
    )
    return site


def run_in_image(
    site: Path, tmp_path: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    entry, command = (
        json.loads(re.findall(rf"^{name} (.+)$", DOCKERFILE, re.MULTILINE)[-1])
        for name in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["qwen-serve"]  # as pip's script does
    command = [sys.executable, "-m", "qwen_serve.server.cli", *(arguments or command)]
    return run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", **environment},
    )


@pytest.mark.slow
def test_the_installed_server_starts_outside_the_checkout(image: Path, tmp_path: Path) -> None:
    helped = run_in_image(image, tmp_path, "serve", "--help")
    assert helped.returncode == 0, helped.stderr
    assert "--model" in helped.stdout


@pytest.mark.slow
def test_another_package_of_a_folders_name_changes_nothing(image: Path, tmp_path: Path) -> None:
    """Installed, there is one top-level package: a `server` that comes first is another's."""
    assert [path.name for path in image.iterdir() if (path / "__init__.py").exists()] == ["qwen_serve"]
    for name in ("server", "convert", "bench", "common", "llamacpp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the other one')")
    search = os.pathsep.join([str(tmp_path), str(image)])
    for module in ("server.cli", "convert", "bench"):
        helped = run(
            [sys.executable, "-m", f"qwen_serve.{module}", "--help"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": search, "PYTHONSAFEPATH": "1"},
        )
        assert helped.returncode == 0, helped.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("serve",)])
def test_the_images_environment_reaches_the_settings(
    image: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Run without a model: the error must name the folder that the image's ENV gives."""
    environment = dict(re.findall(r"(QWEN_\w+)=(\S+)", DOCKERFILE.split("\nENV ")[-1]))
    assert environment.pop("QWEN_VARIANT") == "${VARIANT}"
    assert environment == {"QWEN_MODEL": "/opt/ml/model", "QWEN_HOST": "0.0.0.0", "QWEN_PORT": "8080"}
    folder = tmp_path / "model"
    folder.mkdir()
    refused = run_in_image(image, tmp_path, *arguments, **{**environment, "QWEN_MODEL": str(folder)})
    assert refused.returncode not in (0, None)
    assert str(folder) in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_copied_path_exists_and_is_not_ignored(name: str) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILES[name], re.MULTILINE):
        for source in sources.split():
            if source in ("${MODEL}", "${MMPROJ}"):
                continue
            assert source in paths(), source
            assert source in allowed or source.split("/")[0] in allowed, (
                f"{source}: .dockerignore keeps it out"
            )


def test_the_images_differ_in_what_they_compute_with_alone() -> None:
    """Environment, user, port, health check and command of both are one; test_image.py runs one of them."""
    cuda, cpu = (text[text.rindex("\nENV PATH") :] for text in DOCKERFILES.values())
    assert cuda == cpu


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_images_build_the_server_s_llama_cpp(name: str) -> None:
    """The command is one that setup_llama takes, and what it imports has been copied by then."""
    before, command = re.split(r"\nRUN python3 -m qwen_serve\.server\.setup_llama ", DOCKERFILES[name])
    arguments = shlex.split(command.splitlines()[0].replace("${CUDA_ARCHS}", "86").replace("${PATCHES}", "1"))
    assert arguments[-2:] == ["--native", "0"]
    done = run(
        [sys.executable, "-m", "qwen_serve.server.setup_llama", "--dry-run", *arguments, "--cuda", "0"],
        cwd=ROOT,
        check=True,
    )
    assert "-DGGML_NATIVE=OFF" in done.stdout
    code = "import sys, qwen_serve.server.setup_llama; print(*sys.modules)"
    loaded = run([sys.executable, "-c", code], cwd=ROOT, check=True).stdout.split()
    names = [name.replace(".", "/") for name in loaded if name.partition(".")[0] == "qwen_serve"]
    modules = [f"{name}/__init__.py" if (ROOT / name).is_dir() else f"{name}.py" for name in names]
    assert len(modules) > 3
    for needed in ("pyproject.toml", "patches", "native", *modules):
        assert re.search(rf"^COPY .*{re.escape(needed)} ", before, re.MULTILINE), needed


@pytest.mark.parametrize(
    ("given", "file", "tag", "arguments"),
    [
        (["QUANT=Q5_K_M"], "cuda", "qwen-serve", {"MODEL": "models/Qwen3.5-4B-Q5_K_M.gguf", "VARIANT": ""}),
        (
            ["MODEL=a/b.gguf", "IMAGE=mine", "CUDA_ARCHS=89"],
            "cuda",
            "mine",
            {"MODEL": "a/b.gguf", "CUDA_ARCHS": "89"},
        ),
        (["SRC=some/where/Mine-BF16.gguf"], "cuda", "qwen-serve", {"MODEL": "models/Mine-Q4_K_M.gguf"}),
        (
            ["VARIANT=exact", "SRC=some/where/Mine"],
            "cuda",
            "qwen-serve",
            {"MODEL": "models/Mine-F16.gguf", "VARIANT": "exact"},
        ),
        (["CUDA=0"], "cpu", "qwen-serve-cpu", {"QUANT": "Q4_K_M", "VARIANT": ""}),
        (["CUDA=0", "VARIANT=exact"], "cpu", "qwen-serve-cpu", {"QUANT": "F16", "VARIANT": "exact"}),
    ],
)
def test_make_image(tmp_path: Path, given: list[str], file: str, tag: str, arguments: dict[str, str]) -> None:
    said = dry_run(tmp_path, "image", *given).stdout
    (build,) = [shlex.split(line) for line in said.splitlines() if "docker build" in line]
    values = [word for before, word in pairwise(build) if before == "--build-arg"]
    baked = dict(value.split("=", 1) for value in values)
    assert {"-f": f"Dockerfile.{file}", "-t": tag}.items() <= dict(pairwise(build)).items()
    assert arguments.items() <= baked.items()
    declared = re.findall(r"^ARG (\w+)", DOCKERFILES[f"Dockerfile.{file}"], re.MULTILINE)
    assert baked.keys() <= {*declared}
    converts = any("-m qwen_serve.convert" in line and "'Q5_K_M'" in line for line in said.splitlines())
    assert converts == (given == ["QUANT=Q5_K_M"])


def test_make_image_has_the_vision_tower_of_its_model(tmp_path: Path) -> None:
    for name in ("Mine-Q4_K_M", "mmproj-Mine-BF16", "mmproj-Mine-2-F16", "mmproj-Yours-F16"):
        (tmp_path / f"{name}.gguf").touch()
    model = f"MODEL={tmp_path}/Mine-Q4_K_M.gguf"
    tower = f"{tmp_path}/mmproj-Mine-BF16.gguf"
    assert f"--build-arg MMPROJ='{tower}' " in dry_run(tmp_path, "image", model).stdout
    assert "--build-arg MMPROJ='' " in dry_run(tmp_path, "image", model, "MMPROJ=").stdout


def test_make_submission(tmp_path: Path) -> None:
    """The image that is saved is the one that was built, and the rules are asked of what was baked in."""
    said = dry_run(tmp_path, "submission", "VARIANT=exact", "SRC=some/where/Mine", "IMAGE=mine").stdout
    steps = [shlex.split(line) for line in said.splitlines()]
    build, save = ([step for step in steps if step[:2] == ["docker", verb]] for verb in ("build", "save"))
    (submit,) = [step for step in steps if "scripts/submit.py" in step]
    assert "MODEL=models/Mine-F16.gguf" in build[0]
    assert build[0][-2] == save[0][-1] == "mine"
    options = dict(pairwise(submit))
    assert (options["--model"], options["--original"]) == ("models/Mine-F16.gguf", "some/where/Mine")
    assert steps.index(build[0]) < steps.index(save[0]) < steps.index(submit)


def dry_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What make would run, a line each."""
    # without what a `make test ARGS=...` above hands down
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))
    }
    done = run(["make", "--no-print-directory", "-n", f"VENV={folder}/venv", *arguments], cwd=ROOT, env=own)
    done.stdout = re.sub(r"\\\n[ \t]*", "", done.stdout)
    return done


@pytest.mark.parametrize(
    ("given", "module", "said"),
    [
        ([], "qwen_serve.server", {"--model": "models/nano-Q4_K_M.gguf"}),
        (["VARIANT=small"], "qwen_serve.server.cli", {"serve": "nano", "--variant": "small"}),
        (["VARIANT=small", "MODEL=a/b"], "qwen_serve.server.cli", {"serve": "a/b", "--variant": "small"}),
    ],
)
def test_make_serve(tmp_path: Path, given: list[str], module: str, said: dict[str, str]) -> None:
    """The last command starts the server, with settings that it takes."""
    words = shlex.split(dry_run(tmp_path, "serve", *given).stdout.splitlines()[-1])
    command = dict(pairwise(words))
    assert ({"-m": module} | said).items() <= command.items()
    flags = [word for word in words[words.index(module) :] if word.startswith("--")]
    assert {flag.removeprefix("--") for flag in flags} <= {*Settings.model_fields, "variant"}


def test_the_readme_s_first_commands_do_all_set_up(tmp_path: Path) -> None:
    """`make serve` and `make test` in a fresh clone, with nothing else before them."""
    top = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    (block,) = re.findall(r"^```\n(.*?)^```$", top, re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert commands == [["make", "serve"], ["make", "test"]]
    for _, target in commands:
        said = dry_run(tmp_path, target).stdout
        steps = ["-m venv", "qwen_serve.server.setup_llama", "install -e"]
        found = [said.find(step) for step in steps]
        assert found == sorted(found), said
        assert -1 not in found, said


@pytest.mark.parametrize("target", ["setup", "test"])
def test_what_takes_a_minute_is_not_silent(tmp_path: Path, target: str) -> None:
    printed = dry_run(tmp_path, target).stdout
    installs = re.findall(r"^.* -m pip .*install .*-e .*$", printed, re.MULTILINE)
    assert installs
    assert not [line for line in installs if re.search(r" (-q|--quiet)\b", line)]


@pytest.mark.parametrize("words", [["[MODEL=x.gguf]"], ["[MODEL=x.gguf", "HOST=0.0.0.0]"], ["[x]"]])
def test_make_says_what_brackets_mean(tmp_path: Path, words: list[str]) -> None:
    done = dry_run(tmp_path, "serve", *words)
    assert done.returncode == 2
    assert "brackets mark what may be left out" in done.stderr


@pytest.mark.parametrize(
    ("files", "status", "said"),
    [
        ("", 0, "mount a folder"),
        ("mmproj-a-F16", 0, "mount a folder"),
        ("a", 0, ""),
        ("a mmproj-a-F16", 0, ""),
        ("a b mmproj-a-F16", 1, "names 2 files"),
    ],
)
def test_an_image_has_one_model_or_none(tmp_path: Path, files: str, status: int, said: str) -> None:
    """The step of Dockerfile.cuda that looks, in a folder of its own."""
    assert re.search(r"^ARG MODEL=$", DOCKERFILE, re.MULTILINE)  # and so none, unless it is named
    (step,) = re.findall(r"^RUN (GLOBIGNORE=(?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    for name in files.split():
        (tmp_path / f"{name}.gguf").touch()
    script = step.replace("\\\n", " ").replace("/opt/ml/model/", f"{tmp_path}/")
    done = run(["bash", "-c", script], env={"MODEL": "models/*.gguf"})
    assert done.returncode == status
    assert said in done.stdout + done.stderr


def test_make_knows_variants_by_name_and_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('recipe = "own.toml"\n')
    for given, wanted in (
        ([f"VARIANT={mine}"], {"--quant": "own", "--recipe": f"{tmp_path}/own.toml"}),
        (["VARIANT=exact", "QUANT=Q8_0"], {"--quant": "Q8_0"}),
    ):
        words = shlex.split(dry_run(tmp_path, "convert", *given).stdout.splitlines()[-1])
        assert wanted.items() <= dict(pairwise(words)).items()
    unknown = dry_run(tmp_path, "convert", "VARIANT=exct")
    assert unknown.returncode == 2
    assert re.search(r"VARIANT=exct: no such.*variants/ has .*exact", unknown.stderr)
    baked = dry_run(tmp_path, "image", f"VARIANT={mine}")
    assert baked.returncode == 2
    assert "an image has those of variants/ alone" in baked.stderr


@pytest.mark.slow
def test_data_lies_inside_the_packages(image: Path) -> None:
    """Asked of the installed packages, from a folder that has none of it."""
    script = """
from qwen_serve.convert import recipes
from qwen_serve.server import about
from qwen_serve.server.__main__ import CHAT_TEMPLATE
from qwen_serve.server.llama_build import requirement
from qwen_serve.server.variant import known_variants
from qwen_serve.server.weights import PROMPTS
assert len(known_variants()) == 5
print(recipes.known_recipes() != [], CHAT_TEMPLATE.is_file())
for folder in (*map(about.data_folder, ("patches", "native", "models/nano")), PROMPTS.parent):
    print(folder.is_dir(), folder)
"""
    done = run(
        [sys.executable, "-c", script],
        cwd=image,
        env={**os.environ, "PYTHONPATH": str(image), "PYTHONSAFEPATH": "1"},
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "True True"
    assert all(line.startswith(f"True {image}/") for line in lines[1:]), lines
    queue = {path.name for path in (ROOT / "patches" / "llama.cpp").glob("*.patch")}
    assert {path.name for path in (image / "qwen_serve/server/patches/llama.cpp").iterdir()} == queue
    digest = "from qwen_serve.server.llama_build import sources_digest; print(sources_digest())"
    here, there = (
        run([sys.executable, "-c", digest], cwd=folder, check=True).stdout for folder in (ROOT, image)
    )
    assert here == there, "an installed package asks for the same wheel of llama.cpp"
    for name in ("config.json", "tokenizer.json", "model.safetensors-00002-of-00002.safetensors"):
        assert (image / "qwen_serve/server/models/nano" / name).is_file()
    assert not (image / "qwen_serve/server/models/nano/train").exists()


BUILD = """
from setuptools import build_meta
build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
"""
BESIDE = {"native": "**", "patches/llama.cpp": "*.patch", "quant_recipes": "*", "variants": "*.toml"}
"""Folders beside the package, and which of their files it needs when it is installed."""


@pytest.mark.slow
def test_wheel_and_sdist_have_what_git_has(tmp_path: Path) -> None:
    """Neither a module more nor less, and the sources of llama.cpp's changes."""
    for path in files():
        if not path.startswith(("docs/", "models/nano/train/", "tests/")):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).symlink_to(ROOT / path)
    run([sys.executable, "-c", BUILD], cwd=tmp_path, check=True)
    (sdist,), (wheel,) = (tmp_path / "dist").glob("*.tar.gz"), (tmp_path / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        installed = {*archive.namelist()}
    package = {path for path in files() if path.startswith("qwen_serve/")}
    for names in (packed, installed):
        modules = {path for path in names if path.startswith("qwen_serve/") and path.endswith(".py")}
        assert modules == {path for path in package if path.endswith(".py")}
        assert not {path for path in package - names if not path.endswith(".md")}
    beside = {
        path
        for path in files()
        for folder, pattern in BESIDE.items()
        if path.startswith(f"{folder}/") and fnmatch(path, f"{folder}/{pattern}")
    }
    assert len(beside) > len(BESIDE)
    assert beside <= packed
    prefixes = ("qwen_serve/server/", "qwen_serve/convert/")
    assert not {path for path in beside if not {f"{prefix}{path}" for prefix in prefixes} & installed}


def test_the_help_has_every_public_target_and_variable() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets, _, variables = run(["make"], cwd=ROOT, check=True).stdout.partition("Variables:")
    lines = re.findall(r"^  ([a-z-]+) +\S", targets.partition("Targets:")[2], re.MULTILINE)
    public = re.search(r"^\.PHONY: (.*)", makefile, re.MULTILINE)
    assert public is not None
    assert {*lines, "llama"} == set(public[1].split())
    internal = {"PYTHON", "CONTAINER", "SOAK_PORT"}
    settable = set(re.findall(r"^([A-Z_]+) *\?=", makefile, re.MULTILINE)) - internal
    assert len(settable) > 20
    assert settable <= set(re.findall(r"\b([A-Z_]+)=", variables))
