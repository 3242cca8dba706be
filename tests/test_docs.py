"""The documentation builds as a site, with no broken link, and has every setting and metric."""

import errno
import html
import os
import re
import sys
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from qwen_serve.server.api import routes
from qwen_serve.server.api.fields.unsupported import UNSUPPORTED
from qwen_serve.server.api.formats.chat import ChatRequest
from qwen_serve.server.api.formats.completions import CompletionRequest
from qwen_serve.server.api.formats.ollama.request import OPTIONS
from qwen_serve.server.api.observe.metrics import Metrics
from qwen_serve.server.api.unsupported import unsupported_endpoint
from qwen_serve.server.engine import EngineStats
from qwen_serve.server.settings import Settings
from qwen_serve.server.settings_sources import parser
from tests.processes import run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
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
def test_the_site_fetches_nothing_and_its_diagrams_are_drawn(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|img)[^>]+src="(?:https?:)?//', text), page
        assert not re.search(r'<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="(?:https?:)?//', text), (
            page
        )
        assert 'class="mermaid"' not in text, page
    for name in ("architecture", "overview"):
        text = (site / name / "index.html").read_text(encoding="utf-8")
        assert "flowchart" not in text, f"{name}: `python docs/draw.py` draws it"
    assert "pictures/diagram-" in (site / "architecture" / "index.html").read_text(encoding="utf-8")


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


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CHANGELOG.md")]
    version = re.search(r'^version = "(.*)"', texts[0], re.MULTILINE)
    section = re.search(r"^## (\S+)", texts[1], re.MULTILINE)
    assert version
    assert section
    assert section[1] in (version[1], "Unreleased")
    assert f"download/v{version[1]} " in (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")


def test_messages_of_the_troubleshooting_table_are_in_the_code() -> None:
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8").partition("## Troubleshooting")[2]
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    rooms = [ROOT / "qwen_serve" / room for room in ("common", "llamacpp", "server")]
    files = [file for room in rooms for file in room.rglob("*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    text = re.sub(r'"\s*\n\s*f?"', "", code) + os.strerror(errno.EADDRINUSE)  # adjacent literals are one
    parts = [part.strip() for message in messages for part in message.split("...") if part.strip()]
    assert len(messages) > 10
    assert not [part for part in parts if part not in text]


PEERS = sorted((ROOT / "docs").glob("from-*.md"))


def rows_of(page: Path, section: str) -> list[tuple[str, str]]:
    """Rows of a section's table: what another server has, and what the column `qwen-serve` says."""
    text = page.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    assert lines[0][1].strip() == "qwen-serve"
    return [(line[0], line[1].strip()) for line in lines[2:]]


def sections_of(page: Path) -> list[str]:
    return re.findall(r"^## (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)[1:]


@pytest.mark.parametrize("page", PEERS, ids=lambda page: page.stem)
def test_flags_beside_those_of_another_server_exist(page: Path) -> None:
    ours = {"--quant", *re.findall(r"--[a-z][a-z0-9-]*", parser().format_help())}
    cells = " ".join(cell for section in sections_of(page) for _, cell in rows_of(page, section))
    named = set(re.findall(r"--[a-z][a-z0-9-]*", cells))
    assert len(named) > 10
    assert named <= ours


@pytest.mark.parametrize("page", PEERS, ids=lambda page: page.stem)
def test_endpoints_beside_those_of_another_server_answer_as_said(page: Path) -> None:
    all_routes = [*routes.answers.routes, *routes.others.routes]
    served = [route.path_regex for route in all_routes if isinstance(route, APIRoute)]
    for theirs, here in rows_of(page, "Endpoints"):
        for path in re.findall(r"`(?:GET )?(/[^`?]*)", theirs):
            is_served = any(pattern.match(path) for pattern in served)
            assert is_served == (here == "the same"), path
            assert bool(unsupported_endpoint(path)) == (here == "501") or is_served, path


@pytest.mark.parametrize("page", PEERS, ids=lambda page: page.stem)
def test_fields_and_metrics_beside_those_of_another_server_exist(page: Path) -> None:
    idle = EngineStats(0, 0, 0, 0, 0, 0, 0, 0)
    metrics = Metrics().render(idle).decode()
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *OPTIONS}
    for section in {"Metrics", "Fields", "Options of a request"} & set(sections_of(page)):
        for theirs, here in rows_of(page, section):
            assert all(name in metrics for name in re.findall(r"`(qwen_\w+)`", here))
            fields = set(re.findall(r"`([a-z_]+)`", theirs)) if section != "Metrics" else set()
            assert here != "400 that names the field" or fields <= UNSUPPORTED.keys()
            assert not here.startswith("the same") or fields <= known, fields - known


def test_the_chart_of_three_servers_has_the_figures_of_the_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    figures = (
        (ROOT / "docs" / "results" / "peers" / "figures.csv").read_text(encoding="utf-8").splitlines()[1:]
    )
    assert figures
    assert all(f"| {int(line.rpartition(',')[2]):,} |" in page for line in figures)
