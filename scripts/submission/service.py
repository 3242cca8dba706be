"""Client of the submission service: register, upload in one or more parts, complete, submit.

| request | body | answer |
|---|---|---|
| POST /submissions | team, name, size, sha256, parts | id |
| POST /submissions/ID/urls | parts: [1, 2] | urls: {"1": URL, "2": URL}, which expire |
| PUT URL | a part's bytes | header ETag |
| POST /submissions/ID/complete | parts: [{number, etag}] | |
| POST /submissions/ID/submit | | status |

A request is repeated after a lost connection, a 429 or a 5xx. After a 403 (an expired URL) a new URL is
requested. The finished parts are recorded in a file beside the image, so that the same command continues the
upload.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import requests
from pydantic import BaseModel, ValidationError
from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from qwen_serve.bench.errors import ServerError, UnreachableError
from qwen_serve.bench.store import write_atomically

log = logging.getLogger(__name__)

PART = 1 << 30
"""Size of a part in bytes, if there are several."""

ONE_PART = 5_000_000_000
"""Maximum size, in bytes, of an image that is uploaded in one part."""

CHUNK = 1 << 20


class Passing(Exception):
    """A temporary failure: the request may be repeated."""


class Progress(BaseModel):
    """The state of an image's upload."""

    sha256: str
    size: int
    part_size: int
    id: str
    etags: dict[int, str] = {}

    @property
    def parts(self) -> range:
        """Numbers of the parts, from 1."""
        return range(1, -(-self.size // self.part_size) + 1)


class Service:
    """The service, for one team. `attempts`: maximum attempts of each request; `longest`: maximum wait
    between two, in seconds."""

    def __init__(self, url: str, key: str, team: str, *, attempts: int = 8, longest: float = 60.0) -> None:
        self._url, self._team = url.rstrip("/"), team
        self._session = requests.Session()
        self._session.headers["Authorization"] = f"Bearer {key}"
        self._retrying = Retrying(
            stop=stop_after_attempt(attempts),
            wait=wait_random_exponential(multiplier=min(1.0, longest), max=longest),
            retry=retry_if_exception_type(Passing),
            before_sleep=before_sleep_log(log, logging.WARNING),
            reraise=True,
        )

    def hand_in(
        self, image: Path, name: str, tell: Callable[[int], None], *, part_size: int | None = None
    ) -> str:
        """Upload the missing parts and submit the image. Returns the status that the service reports.

        `tell` is called with the numbers of bytes sent, including those of earlier commands. Raises
        BenchError if the service refuses or cannot be reached.
        """
        kept = image.with_name(f"{image.name}.upload.json")
        progress = self._progress(image, kept, name, part_size)
        for number in progress.parts:
            start = (number - 1) * progress.part_size
            count = min(progress.part_size, progress.size - start)
            if number in progress.etags:
                tell(count)
                continue
            progress.etags[number] = self._again(self._put, progress.id, image, number, start, count, tell)
            write_atomically(kept, progress.model_dump_json(indent=1))
        parts = [{"number": number, "etag": etag} for number, etag in sorted(progress.etags.items())]
        self._again(self._post, f"/submissions/{progress.id}/complete", {"parts": parts})
        state = self._again(self._post, f"/submissions/{progress.id}/submit", {}).get("status", "submitted")
        kept.unlink(missing_ok=True)
        return str(state)

    def _progress(self, image: Path, kept: Path, name: str, part_size: int | None) -> Progress:
        """The state of an earlier command's upload of the same image; else that of a new registration."""
        size, digest = image.stat().st_size, sha256(image)
        try:
            progress = Progress.model_validate_json(kept.read_bytes())
            if (progress.sha256, progress.size) == (digest, size):
                return progress
        except (OSError, ValidationError):
            pass
        part_size = part_size or (size if size <= ONE_PART else PART)
        progress = Progress(sha256=digest, size=size, part_size=part_size, id="")
        body = {
            "team": self._team,
            "name": name,
            "size": size,
            "sha256": digest,
            "parts": len(progress.parts),
        }
        progress.id = str(self._again(self._post, "/submissions", body)["id"])
        write_atomically(kept, progress.model_dump_json(indent=1))
        return progress

    def _again(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._retrying.copy()(ask, *arguments)
        except Passing as error:
            raise UnreachableError(f"{error}; given up: the same command goes on from here") from error

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._session.post(self._url + path, json=body, timeout=60)
        except (requests.ConnectionError, requests.Timeout) as error:
            raise Passing(f"POST {path}: {error}") from error
        self._judge(answer, f"POST {path}")
        try:
            found = answer.json() if answer.content else {}
        except requests.JSONDecodeError as error:
            raise ServerError(f"POST {path}: no JSON: {answer.text[:200]}", answer.status_code) from error
        return dict(found)

    def _put(
        self, id: str, image: Path, number: int, start: int, count: int, tell: Callable[[int], None]
    ) -> str:
        """Upload one part to a new URL. Returns its ETag."""
        url = self._post(f"/submissions/{id}/urls", {"parts": [number]})["urls"][str(number)]
        sent = 0

        def pieces(file: IO[bytes]) -> Iterator[bytes]:
            nonlocal sent
            file.seek(start)
            while left := count - sent:
                piece = file.read(min(CHUNK, left))
                sent += len(piece)
                tell(len(piece))
                yield piece

        try:
            with image.open("rb") as file:
                # without the session, whose header would send the key to the storage's host
                answer = requests.put(url, data=_Sized(pieces(file), count), timeout=600)
            if answer.status_code == 403:
                raise Passing(f"part {number}: 403, its URL has expired")
            self._judge(answer, f"part {number}")
        except (requests.ConnectionError, requests.Timeout) as error:
            tell(-sent)
            raise Passing(f"part {number}: {error}") from error
        except Exception:
            tell(-sent)
            raise
        return answer.headers.get("ETag", "")

    @staticmethod
    def _judge(answer: requests.Response, what: str) -> None:
        """Raises Passing for a temporary error, ServerError for others."""
        status = answer.status_code
        if status == 429 or status >= 500:
            raise Passing(f"{what}: {status} {answer.text[:200]}")
        if status >= 400:
            raise ServerError(f"{what}: {status} {answer.text[:200]}", status)


class _Sized:
    """An iterator of bytes with a length, so that requests sends Content-Length and no chunks."""

    def __init__(self, pieces: Iterator[bytes], size: int) -> None:
        self._pieces, self._size = pieces, size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces


def sha256(path: Path) -> str:
    """A file's SHA-256, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
