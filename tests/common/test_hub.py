"""Downloads of several processes at once: whatever becomes of each, a blob is whole or absent."""

import hashlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from qwen_serve.common import hub

DATA = bytes(range(256)) * 40
DIGEST = hashlib.sha256(DATA).hexdigest()
N = 4


class Killed(Exception):
    """In place of a kill: the file is closed as it is, which ends its lock."""


class Transfers:
    """The hub client's transfers, one after the other: each ends as its outcome says, the last ones well."""

    def __init__(self, outcomes: tuple[str, ...]) -> None:
        self.outcomes, self.begun = list(outcomes), 0
        self.resumed: list[int] = []
        self.all_wait = threading.Event()
        """Set once every other process has opened the part, and waits for its lock."""

    def get(self, _: str, file: BinaryIO, *, resume_size: int, **__: Any) -> None:
        assert self.all_wait.wait(60)
        self.begun += 1
        self.resumed.append(resume_size)
        outcome = self.outcomes.pop(0) if self.outcomes else "whole"
        rest = DATA[resume_size:]
        if outcome == "killed":
            file.write(rest[: len(rest) // 2])
            raise Killed
        file.write(bytes([rest[0] ^ 1]) + rest[1:] if outcome == "damaged" else rest)


@pytest.mark.parametrize(
    "outcomes", list(itertools.product(["whole", "damaged", "killed"], repeat=N - 1)), ids="-".join
)
def test_four_processes_one_file(
    outcomes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock belongs to an open file, so threads stand for processes."""
    blob, transfers = tmp_path / DIGEST, Transfers(outcomes)
    waiting = itertools.count(1)

    def said(text: str, **_: Any) -> None:
        if "waiting for it" in text and next(waiting) == N - 1:
            transfers.all_wait.set()

    monkeypatch.setattr(hub, "print", said, raising=False)
    monkeypatch.setattr(hub, "http_get", transfers.get)

    def process(_: int) -> str:
        try:
            hub._download("http://hub", blob, len(DATA), "a.gguf")  # noqa: SLF001 - of one file, without a hub
        except Killed:
            return "killed"
        except hub.DownloadError:
            return "damaged"
        assert blob.read_bytes() == DATA
        return "whole"

    with ThreadPoolExecutor(N) as pool:
        results = list(pool.map(process, range(N)))
    failed = list(itertools.takewhile(lambda outcome: outcome != "whole", outcomes))
    assert sorted(result for result in results if result != "whole") == sorted(failed)
    assert transfers.begun == len(failed) + 1
    for before, start in zip(["damaged", *failed], transfers.resumed, strict=True):
        assert (start > 0) == (before == "killed"), "a part goes on where it ended"
    assert [path.name for path in tmp_path.iterdir()] == [DIGEST]


def test_a_part_that_somebody_else_removes_is_not_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's own client may remove it; what then has its name is not ours."""
    blob = tmp_path / DIGEST
    part = tmp_path / f"{DIGEST}.incomplete"
    starts: list[int] = []

    def get(_: str, file: BinaryIO, *, resume_size: int, **__: Any) -> None:
        starts.append(resume_size)
        if len(starts) == 1:
            part.unlink()
            part.write_bytes(DATA[:5])
        file.write(DATA[resume_size:])

    monkeypatch.setattr(hub, "http_get", get)
    hub._download("http://hub", blob, len(DATA), "a.gguf")  # noqa: SLF001 - as above
    assert starts == [0, 5]
    assert blob.read_bytes() == DATA


def test_a_blob_is_read_when_a_process_first_uses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blob, link = tmp_path / DIGEST, tmp_path / "a.gguf"
    link.symlink_to(blob)
    assert not hub.is_intact(link)
    blob.write_bytes(DATA)
    assert hub.is_intact(link)
    blob.write_bytes(DATA[:-1] + b"x")
    assert hub.is_intact(link), "once in a process"
    hub._intact.clear()  # noqa: SLF001 - another process
    assert not hub.is_intact(link)
    assert not blob.exists()
    assert "has other bytes than were fetched; it is removed" in capsys.readouterr().err
    blob.mkdir()
    with pytest.raises(hub.DownloadError, match="is no file; remove it"):
        hub.is_intact(link)
