"""Dockerfile.cpu, executed: every step in a chroot of Debian packages, then its server (make test-image)."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from qwen_serve.bench.servers.launch import free_port
from qwen_serve.server.weights import CONVERTING
from tests.chroot_image import Stage, build, instructions, start
from tests.processes import run
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root"),
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed"),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The built image; IMAGE_ROOT names the last stage of one that tests/chroot_image.py has built."""
    if ready := os.environ.get("IMAGE_ROOT"):
        yield _described(Path(ready))
        return
    folder = tmp_path_factory.mktemp("image")
    yield build(ROOT / "Dockerfile.cpu", ROOT, folder)
    shutil.rmtree(folder, ignore_errors=True)


def _described(root: Path) -> Stage:
    stage = Stage(root)
    last = (ROOT / "Dockerfile.cpu").read_text().rpartition("\nFROM ")[2]
    for name, rest in instructions(last.partition("\n")[2]):
        stage.read(name, rest)
    return stage


@contextmanager
def running(
    image: Stage, *arguments: str, model: Path | None = None, **variables: str
) -> Iterator[tuple[httpx.Client, int]]:
    """A client of the started image, and the server's process id."""
    port = free_port()
    variables |= {"QWEN_PORT": str(port), "QWEN_THREADS": "1"}
    process = start(image, *arguments, model=model, **variables)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_until(lambda: _ready(client) or process.poll() is not None, 120)
            assert process.poll() is None, "the server ended"
            yield client, process.pid
    finally:
        process.terminate()
        assert process.wait(60) == 0


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ping").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("arguments", [(), ("serve",), ("serve", "--parallel", "2")])
def test_it_answers_however_it_is_started(image: Stage, arguments: tuple[str, ...]) -> None:
    with running(image, *arguments) as (client, pid):
        messages = [{"role": "user", "content": "What is 2+2?"}]
        answer = client.post("/invocations", json={"messages": messages, "max_tokens": 16}).json()
        assert "4" in answer["choices"][0]["message"]["content"]
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.search(rf"^Uid:\s+{image.user}\s+{image.user}\s", status, re.MULTILINE)
        text = (ROOT / "Dockerfile.cpu").read_text()
        check = json.loads(re.findall(r"CMD (\[\"python3\".+\])", text)[0])
        port = str(client.base_url.port)
        assert image.run(*check, QWEN_PORT=port).returncode == 0
        assert image.run(*check, QWEN_PORT="1").returncode != 0
        assert not os.access(f"/proc/{pid}/root/opt", os.W_OK)  # even root: the file system is read-only


def test_it_has_nothing_that_converts(image: Stage) -> None:
    installed = {path.name for path in (image.root / "opt/venv/lib").glob("python3*/site-packages/*")}
    assert "qwen_serve" in installed
    assert not installed & {*CONVERTING}


def test_a_mounted_folder_replaces_the_model(image: Stage, tmp_path: Path) -> None:
    (baked,) = (image.root / "opt/ml/model").glob("*.gguf")
    shutil.copy(baked, tmp_path / "mine.gguf")
    tmp_path.chmod(0o755)
    with running(image, model=tmp_path) as (client, _):
        assert client.get("/v1/models").json()["data"][0]["id"] == "mine"


def test_a_variant_that_is_baked_in(image: Stage) -> None:
    """Its name reaches the server as a variable, and the file is in the package."""
    with running(image, QWEN_VARIANT="small") as (client, _):
        assert client.get("/v1/models").json()["data"][0]["id"] == "nano-Q4_K_M"
    assert image.run(*image.entrypoint, *image.command, QWEN_VARIANT="smal").returncode == 2


def test_what_it_holds(image: Stage) -> None:
    assert [path.name for path in (image.root / "opt/ml/model").iterdir()] == ["nano-Q4_K_M.gguf"]
    assert not (image.root / "usr/bin/gcc").exists()
    used = run(["du", "-sxm", image.root], check=True).stdout
    assert int(used.split()[0]) < 1000
