"""The documentation builds as a site, with no broken link, and has every setting and metric."""

from __future__ import annotations

import html
import os
import re
import sys
from pathlib import Path

import pytest

from qwen_serve.server.settings import Settings
from tests.processes import run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "DISABLE_MKDOCS_2_WARNING": "true", "PYTHONPATH": str(ROOT)}
    done = run(command, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_every_setting_has_its_row(site: Path) -> None:
    text = text_of(site / "settings" / "index.html")
    missing = [name for name in Settings.model_fields if f"--{name.replace('_', '-')}" not in text]
    assert not missing


@pytest.mark.slow
def test_metrics_are_listed(site: Path) -> None:
    text = text_of(site / "metrics" / "index.html")
    for name in ("qwen_requests", "qwen_prefix_hits", "qwen_running_sequences", "qwen_draft_verifications"):
        assert name in text


@pytest.mark.slow
def test_pages_of_the_tree_are_there_and_link_to_each_other(site: Path) -> None:
    assert "api -> chat -> engine" in text_of(site / "architecture" / "index.html")
    page = (site / "benchmarks" / "index.html").read_text(encoding="utf-8")
    assert 'href="../patches/"' in page
    assert "](" not in text_of(site / "contributing" / "index.html")


def test_links_in_the_tree_lead_somewhere() -> None:
    """On the site strict mode sees to that."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")]
    pages += [ROOT / "models" / "nano" / "README.md", ROOT / "server/engine/prefix_cache/README.md"]
    pages += (ROOT / "patches").rglob("*.md")
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#:\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in target and not target.startswith("http")
    ]
    assert len(links) > 50
    assert not [(page.name, target) for page, target in links if not (page.parent / target).exists()]
