"""Folders, hub ids and the hub's cache, without a network."""

import hashlib
from pathlib import Path

import pytest
from huggingface_hub import constants

from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.source import resolve
from tests.checkpoints import write_checkpoint
from tests.fake_hub import REPO, in_place_of_the_hub

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds Someone/Tiny-1B, and no way to the hub."""
    model = tmp_path / "hub" / "models--Someone--Tiny-1B"
    write_checkpoint(model / "snapshots" / REVISION)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_folder_gives_its_own_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "My-Finetune")
    source = resolve(str(folder))
    assert (source.path, source.name, source.url) == (folder, "My-Finetune", None)


def test_a_relative_folder_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_checkpoint(tmp_path / "My-Finetune"))
    assert resolve(".").name == "My-Finetune"


def test_a_snapshot_folder_of_the_cache_is_recognised(offline_cache: Path) -> None:
    source = resolve(str(offline_cache / "models--Someone--Tiny-1B" / "snapshots" / REVISION))
    assert (source.repo_id, source.revision, source.name) == ("Someone/Tiny-1B", REVISION, "Tiny-1B")


@pytest.mark.usefixtures("offline_cache")
def test_a_hub_id_comes_from_the_cache_when_offline() -> None:
    source = resolve("Someone/Tiny-1B")
    assert (source.repo_id, source.revision) == ("Someone/Tiny-1B", REVISION)
    assert source.url == "https://huggingface.co/Someone/Tiny-1B"
    assert (source.path / "config.json").is_file()


@pytest.mark.usefixtures("offline_cache")
def test_a_hub_id_out_of_reach() -> None:
    with pytest.raises(
        ConvertError, match=r"--src Someone/Else: no such folder, and it could not be fetched"
    ):
        resolve("Someone/Else")


def test_whatever_the_hub_client_raises_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the wire\nis cut")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("qwen_serve.convert.source.HfApi.model_info", fail)
    monkeypatch.setattr("qwen_serve.convert.source.snapshot_download", fail)
    with pytest.raises(ConvertError, match=r"could not be fetched from the hub: the wire$"):
        resolve("Someone/Tiny-1B")


WEIGHTS = bytes(range(256)) * 1200


def test_a_checkpoint_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no part of a checkpoint is not fetched."""
    first = "model-00001-of-00002.safetensors"
    files = {"config.json": b"{}", first: WEIGHTS, first.replace("1", "2", 1): b"second", "a.gguf": b"no"}
    blobs = tmp_path / "hub" / f"models--{REPO.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete").write_bytes(WEIGHTS[:100_000])
    with in_place_of_the_hub(monkeypatch, tmp_path, files) as hub:
        source = resolve(REPO)
        assert {path.name: path.read_bytes() for path in source.path.iterdir()} == {
            name: data for name, data in files.items() if name != "a.gguf"
        }
        assert [part for method, _, part in hub.asked if method == "GET" and part] == ["bytes=100000-"]
        asked = len(hub.asked)
        assert resolve(REPO) == source
        assert not [path for method, path, _ in hub.asked[asked:] if "/resolve/" in path]


def test_neither_folder_nor_hub_id() -> None:
    with pytest.raises(
        ConvertError, match=r"no such file or folder, and not a hub id such as Qwen/Qwen3\.5-4B"
    ):
        resolve("no-such-thing")
