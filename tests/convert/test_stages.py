"""Outputs appear completely or not at all, and are made again only if they are out of date."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.stages import Output, StageRecord, fingerprint, locked, replacing


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "x.gguf"
    record = StageRecord(tmp_path / "x.stages.json")
    record.make(Output(path, "fingerprint"), lambda part: part.write_text("content"))
    return path


def is_finished(output: Path, fingerprint: str = "fingerprint") -> bool:
    return StageRecord(output.with_name("x.stages.json")).is_finished(Output(output, fingerprint))


def test_what_was_finished_is_known_to_the_next_run(output: Path) -> None:
    assert is_finished(output)


def test_a_file_of_this_folder_tells_what_it_was_made_from(output: Path, tmp_path: Path) -> None:
    record = StageRecord(output.with_name("x.stages.json"))
    assert record.made_from(output) == "fingerprint"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy2(output, elsewhere)
    assert record.made_from(elsewhere / output.name) is None
    output.write_text("another content")
    assert record.made_from(output) is None


def test_seconds_are_those_of_the_run_that_made_it(tmp_path: Path) -> None:
    path, output = tmp_path / "x.stages.json", Output(tmp_path / "x.txt", "f")

    def write(part: Path) -> None:
        time.sleep(0.05)  # how long it takes is the subject
        part.write_text("x")

    first = StageRecord(path)
    first.make(output, write)
    assert first.seconds([output]) >= 0.05
    second = StageRecord(path)
    assert second.seconds([output]) == 0, "not asked for yet"
    second.make(output, lambda part: pytest.fail("made again"))
    assert second.seconds([output]) == pytest.approx(first.seconds([output]))


def test_other_inputs_make_it_stale(output: Path) -> None:
    assert not is_finished(output, "other")


def test_a_removed_output_is_not_finished(output: Path) -> None:
    output.unlink()
    assert not is_finished(output)


def test_an_output_of_another_size_is_not_finished(output: Path) -> None:
    output.write_text("cut")
    assert not is_finished(output)


def test_an_output_touched_by_someone_else_is_not_finished(output: Path) -> None:
    os.utime(output, ns=(0, 0))
    assert not is_finished(output)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x.gguf": 3}'])
def test_a_damaged_record_means_that_nothing_is_finished(output: Path, text: str) -> None:
    output.with_name("x.stages.json").write_text(text)
    assert not is_finished(output)


def test_a_fingerprint_is_of_the_content_not_of_the_order() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})


def test_the_lock_keeps_others_waiting(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = "\n".join(
        [
            "from pathlib import Path",
            "from qwen_serve.convert.stages import locked",
            f"with locked(Path({str(lock)!r})): print('in')",
        ]
    )
    with locked(lock):
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert other.stderr is not None
        assert b"waiting" in other.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    out, _ = other.communicate(timeout=60)
    assert out == b"in\n"


def test_another_s_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("precious")

    def make(*, force: bool) -> None:
        with StageRecord.locked(tmp_path, "x", force=force) as record:
            record.make(Output(path, "f"), lambda part: part.write_text("new"))

    with pytest.raises(ConvertError, match=r"x\.gguf: is there, .* or --force"):
        make(force=False)
    assert path.read_text() == "precious"
    assert not (tmp_path / "x.stages.json").exists()
    make(force=True)
    assert path.read_text() == "new"


def test_another_s_file_is_refused_before_any_work(tmp_path: Path, output: Path) -> None:
    record = StageRecord(output.with_name("x.stages.json"))
    record.check_room([(Output(output, "newer"), 1)])  # ours, of another time
    (tmp_path / "y.gguf").write_text("precious")
    with pytest.raises(ConvertError, match=r"y\.gguf: is there"):
        record.check_room([(Output(tmp_path / "y.gguf", "f"), 1)])
    output.write_text("changed since")
    with pytest.raises(ConvertError, match=r"x\.gguf: is there"):
        record.check_room([(Output(output, "newer"), 1)])


def test_a_run_that_dies_before_the_renaming_can_be_repeated(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On record is what would be there, and what still is."""

    class Killed(BaseException):
        pass

    record = StageRecord(output.with_name("x.stages.json"))
    newer = Output(output, "newer")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        rename = Path.replace

        def die(path: Path, target: Path) -> Path:
            if target == output:
                raise Killed
            return rename(path, target)

        patch.setattr(Path, "replace", die)
        record.make(newer, lambda part: part.write_text("new content"))
    assert output.read_text() == "content"
    again = StageRecord(output.with_name("x.stages.json"))
    assert not again.is_finished(newer)
    again.make(newer, lambda part: part.write_text("new content"))
    assert output.read_text() == "new content"


def test_a_planted_lock_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".convert.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError), StageRecord.locked(tmp_path, "x", force=False):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


def test_errors_name_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(ConvertError) as raised, replacing(path) as part:
        raise ConvertError(f"llama.cpp cannot quantize a.gguf to {part}: no")
    assert str(raised.value) == f"llama.cpp cannot quantize a.gguf to {path}: no"
    with pytest.raises(PermissionError) as refused, replacing(path) as part:
        raise PermissionError(13, "Permission denied", str(part))  # as common.files names it
    assert refused.value.filename == str(path)
