"""The chat page in the system's Chromium, before a server over the scripted engine."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.api.conftest import Start, starter

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers, as the tests of the API do."""
    with starter(tmp_path) as start:
        yield start


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (the extra dev)"
    )
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails its test on an error, or on a request to another host."""
    context = browser.new_context()
    page = context.new_page()
    problems: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.set_default_timeout(60_000)
    yield page
    context.close()
    assert not problems
    assert all(url.startswith(("http://127.0.0.1:", "data:", "blob:")) for url in asked), asked
