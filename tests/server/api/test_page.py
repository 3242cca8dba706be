"""The chat page's files: which are served, and with which headers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

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
