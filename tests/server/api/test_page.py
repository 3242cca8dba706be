"""The chat page's files and their headers."""

import json
from typing import Any

import httpx
import pytest

from qwen_serve.server.api.page import FOLDER, TEXTS
from tests.server.api.conftest import Server, Start


def served(start: Start, **options: Any) -> Server:
    return start("x", **options)


def test_its_files_are_locked_down(start: Start) -> None:
    server = served(start, api_key="secret")
    for path in ("/", "/page/chat.js", "/page/vendor/marked.umd.js"):
        answer = server.http.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
    assert server.http.head("/").status_code == 200


def test_all_of_it_but_fonts_comes_in_400_kilobytes_and_unpacks_to_its_files(start: Start) -> None:
    server = served(start)
    files = [path for path in FOLDER.rglob("*.*") if path.suffix in TEXTS]
    whole = 0
    for path in files:
        address = "/" if path.name == "index.html" else f"/page/{path.relative_to(FOLDER)}"
        answer = server.http.get(address, headers={"accept-encoding": "gzip"})
        assert answer.content == path.read_bytes()
        assert (answer.headers["content-encoding"], answer.headers["vary"]) == ("gzip", "Accept-Encoding")
        assert "content-security-policy" in answer.headers
        if not path.name.startswith("pdf."):  # which only who gives a PDF loads
            whole += int(answer.headers["content-length"])
        plain = server.http.get(address, headers={"accept-encoding": "identity"})
        assert plain.content == path.read_bytes()
        assert "content-encoding" not in plain.headers
    assert whole < 400_000
    again = {"accept-encoding": "gzip", "if-none-match": answer.headers["etag"]}
    assert server.http.get(address, headers=again).status_code == 304


@pytest.mark.parametrize(
    "path", ["/page/../settings.py", "/page/%2e%2e/settings.py", "/page/no.js", "/page/"]
)
def test_nothing_else_is_served(start: Start, path: str) -> None:
    with httpx.Client() as http:
        answer = http.get(served(start).url.rstrip("/") + path)
    assert answer.status_code == 404
    assert "error" in json.loads(answer.text)


def test_it_can_be_left_out(start: Start) -> None:
    assert served(start, page=False).http.get("/").status_code == 404
