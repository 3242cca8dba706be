"""A model file is identified by its content at the time of loading."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest

from qwen_serve.llamacpp import Model
from qwen_serve.server.engine import Engine, ModelLoadError, model_file
from qwen_serve.server.engine.model_file import BLOCK, ModelFile
from qwen_serve.server.engine.planning import contexts
from tests.server.engine.helpers import EXACT, Question, answers_alone, ask, random_prompt, running, settings


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Files that were read whole; fingerprints are kept in a cache folder of the test's own."""
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_file, "SETTLED_NS", 0)
    done: list[Path] = []
    digest = model_file._digest  # noqa: SLF001 - a read that is counted

    def watched(model: ModelFile) -> str:
        done.append(model.path)
        return digest(model)

    monkeypatch.setattr(model_file, "_digest", watched)
    return done


def found(path: Path) -> ModelFile:
    return ModelFile.of(path, path.stat())


def restart() -> None:
    """Forget what this process knows, as after a restart."""
    model_file._fingerprint.cache_clear()  # noqa: SLF001 - as in another process


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(random.Random(1).randbytes(2 * BLOCK + 1000))
    return path


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, BLOCK + BLOCK // 2, -1])
def test_every_byte_counts(made: Path, read: list[Path], place: int) -> None:
    before = found(made).fingerprint()
    content = bytearray(made.read_bytes())
    content[place] ^= 1
    other = made.with_name("other.gguf")
    other.write_bytes(content)
    assert found(other).fingerprint() != before
    shutil.copy(made, other)
    assert found(other).fingerprint() == before


def test_a_restart_reads_nothing_again(made: Path, read: list[Path]) -> None:
    first = found(made).fingerprint()
    restart()
    assert found(made).fingerprint() == first
    assert read == [made]
    content = bytearray(made.read_bytes())
    content[BLOCK] ^= 1
    status = made.stat()
    made.write_bytes(content)
    os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))  # as `cp -p` does
    restart()
    assert found(made).fingerprint() != first


@pytest.mark.parametrize("damage", ["not JSON", "{}", "[]"])
def test_a_damaged_record_costs_what_it_would_have_saved(
    made: Path, read: list[Path], damage: str, tmp_path: Path
) -> None:
    first = found(made).fingerprint()
    [record] = (tmp_path / "cache" / "fingerprints").iterdir()
    record.write_text(damage)
    restart()
    assert found(made).fingerprint() == first
    assert read == [made, made]


def test_what_was_just_written_is_not_kept(
    made: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file could be written again within one tick of the file system's clock."""
    monkeypatch.setattr(model_file, "SETTLED_NS", 3600 * 10**9)
    assert found(made).fingerprint()
    assert not (tmp_path / "cache").exists()


def test_one_that_was_changed_since_is_told(made: Path, read: list[Path], tmp_path: Path) -> None:
    before = found(made)
    other = tmp_path / "other"
    shutil.copy(made, other)
    other.replace(made)
    with pytest.raises(ModelLoadError, match=r"model\.gguf was changed or replaced while it was loaded"):
        before.fingerprint()
    made.unlink()
    with pytest.raises(ModelLoadError, match=r"model\.gguf cannot be read: No such file"):
        before.fingerprint()


def test_one_that_was_asked_before_stays_what_it_was(made: Path, read: list[Path], tmp_path: Path) -> None:
    before = found(made)
    mine = before.fingerprint()
    other = tmp_path / "other"
    shutil.copy(made, other)
    other.replace(made)
    before.confirm()  # the same content
    made.write_bytes(made.read_bytes()[:-1] + b"?")
    assert before.fingerprint() == mine
    with pytest.raises(ModelLoadError, match="changed or replaced"):
        before.confirm()


def with_other_weights(path: Path, to: Path) -> Path:
    """The same shapes and other numbers in the middle of the file: layers are scaled, ends are the same."""
    shutil.copy(path, to)
    reader = gguf.GGUFReader(to, "r+")
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and tensor.name.endswith("ffn_down.weight"):
            tensor.data[:] = tensor.data * 3
    del reader
    return to


async def test_a_replaced_model_does_not_use_the_states_of_the_one_before(
    nano_f32: Path, tmp_path: Path
) -> None:
    """An upgrade: B takes A's name while A is served, A ends, B starts."""
    path, states = tmp_path / "model.gguf", tmp_path / "prefixes"
    shutil.copy(nano_f32, path)
    other = with_other_weights(nano_f32, tmp_path / "other.gguf")
    prompt = random_prompt(random.Random(1), 300)
    options: dict[str, Any] = {**EXACT, "prefix_file": states}
    [a], [b] = answers_alone(path, [prompt], 8), answers_alone(other, [prompt], 8)
    assert a != b
    with running(path, **options) as engine:
        assert (await ask(engine, Question(prompt, 8))).tokens == a
        other.replace(path)
    assert states.is_file()
    with running(path, **options) as engine:
        assert (await ask(engine, Question(prompt, 8))).tokens == b
        assert engine.stats().prompt_tokens == 300


async def test_a_model_that_was_overwritten_leaves_no_states(
    nano_f32: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, states = tmp_path / "model.gguf", tmp_path / "prefixes"
    shutil.copy(nano_f32, path)
    with running(path, **EXACT, prefix_file=states) as engine:
        await ask(engine, Question(random_prompt(random.Random(1), 100), 4))
        with path.open("r+b") as file:
            file.write(b"GGUF")
    assert not states.exists()
    assert any("was overwritten while it was served" in line for line in caplog.messages)


@pytest.mark.parametrize("which", ["model", "draft_model"])
@pytest.mark.parametrize("remember", [True, False])
def test_one_that_is_replaced_in_the_middle_of_loading_is_refused(
    nano_f32: Path,
    nano_draft_f32: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
    remember: bool,
) -> None:
    paths = {"model": tmp_path / "model.gguf", "draft_model": tmp_path / "draft.gguf"}
    shutil.copy(nano_f32, paths["model"])
    shutil.copy(nano_draft_f32, paths["draft_model"])

    def load(path: Path, *, no_alloc: bool = False, **options: Any) -> Model:
        if path == paths[which] and not no_alloc:
            other = with_other_weights(path, tmp_path / "other.gguf")
            other.replace(path)
        return Model(path, no_alloc=no_alloc, **options)

    monkeypatch.setattr(contexts, "Model", load)
    prefixes = None if remember else tmp_path / "prefixes"
    with pytest.raises(ModelLoadError, match=f"{paths[which].name} was changed or replaced"):
        Engine(
            settings(
                paths["model"],
                draft_model=paths["draft_model"],
                speculation="draft",
                prefix_file=prefixes,
                remember=remember,
            )
        )


def test_weights_are_checked_once(
    nano_f32: Path, read: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first load of these bytes, under any name; a changed file is checked again, and refused."""
    path = tmp_path / "model.gguf"
    shutil.copy(nano_f32, path)
    checked: list[bool] = []

    def load(path: Path, **options: Any) -> Model:
        model = Model(path, **options)
        if not options.get("no_alloc"):
            checked.append(model.checked)
        return model

    monkeypatch.setattr(contexts, "Model", load)
    for name in ("model.gguf", "model.gguf", "moved.gguf"):
        path = path.rename(path.with_name(name))
        Engine(settings(path, remember=True)).close()
    Engine(settings(path, remember=False)).close()
    assert checked == [True, False, False, True]
    part = path.with_name("model-00001-of-00001.gguf")
    shutil.copy(path, part)
    assert not found(part).is_checked  # other parts may be others
    reader = gguf.GGUFReader(path, "r+")
    [data] = [tensor.data for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight"]
    data[0, 0] = float("nan")
    reader.data.flush()
    del reader, data
    with pytest.raises(ModelLoadError, match=r"invalid data|not finite"):
        Engine(settings(path, remember=True))
