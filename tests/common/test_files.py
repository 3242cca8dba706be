"""Files are written completely or not at all, through no symbolic link, and never to a pipe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_serve.common.files import open_regular, replacing, write_text


def test_a_whole_file_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "x.gguf"
    target.write_text("old")
    with replacing(target, sync=True) as part:
        assert part.name == "x.gguf"
        part.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert [*tmp_path.iterdir()] == [target]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_one_and_no_remains(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "x.gguf"
    target.write_text("old")
    with pytest.raises(error), replacing(target) as part:
        part.write_text("half")
        raise error
    assert target.read_text() == "old"
    assert [*tmp_path.iterdir()] == [target]


def test_no_planted_link_is_followed(tmp_path: Path) -> None:
    """In a folder that other users can write to, under any name that they could guess."""
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("precious")
    folder.mkdir()
    target = folder / "x.json"
    for name in ("x.json", "x.json.part", ".x.json.part"):
        (folder / name).symlink_to(victim)
    write_text(target, "{}")
    assert victim.read_text() == "precious"
    assert target.read_text() == "{}"
    assert not target.is_symlink()


def test_only_its_owner_comes_at_what_is_not_complete(tmp_path: Path) -> None:
    with replacing(tmp_path / "x") as part:
        assert part.parent.stat().st_mode & 0o777 == 0o700
        part.write_text("half")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    target = tmp_path / "x[1].gguf"
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom qwen_serve.common.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as part:\n"
        "    part.write_text('half')\n    os.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, str(target)], cwd=root, check=False)
    assert done.returncode == -9
    assert len([*tmp_path.iterdir()]) == 1
    with replacing(target) as first:
        assert [*tmp_path.iterdir()] == [first.parent], "the killed one's is gone"
        first.write_text("first")
        write_text(target, "second")
        assert first.read_text() == "first"
    assert target.read_text() == "first"
    assert [*tmp_path.iterdir()] == [target]


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_regular_file_is_neither_replaced_nor_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="no regular file") as caught:
        write_text(path, "text")
    assert caught.value.filename == str(path)
    with pytest.raises(OSError, match=r"no regular file|Is a directory"):
        open_regular(path)
    assert path.exists()
    assert not path.is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's disk without room")
def test_a_full_disk_names_the_file_that_is_written(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    with (
        pytest.raises(OSError, match="No space left") as caught,
        replacing(target),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert caught.value.filename == str(target)
    assert not [*tmp_path.iterdir()]


def test_errors_about_the_file_itself_name_it(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with pytest.raises(OSError, match="No such file") as caught, replacing(target):
        pass  # nothing was written
    assert caught.value.filename == str(target)
    with pytest.raises(FileNotFoundError) as other, replacing(target):
        (tmp_path / "missing").read_bytes()
    assert other.value.filename == str(tmp_path / "missing")
    nowhere = tmp_path / "nowhere" / "x"
    with pytest.raises(FileNotFoundError) as without, replacing(nowhere):
        pass
    assert without.value.filename == str(nowhere)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
