"""Pages of the site that are made from elsewhere in the tree: READMEs, settings, metrics (mkdocs-gen-files).

Links in a README are relative to where it stands. Those to another page of the site are turned to that page;
those to files that have none lose their target and keep their text.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import sys
from pathlib import Path

import mkdocs_gen_files
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from qwen_serve.bench.record.page import community, records_in  # noqa: E402
from qwen_serve.server.api.observe.metrics import Metrics  # noqa: E402
from qwen_serve.server.engine import EngineStats  # noqa: E402
from qwen_serve.server.settings import described_settings  # noqa: E402

PAGES = {
    "README.md": "overview.md",
    "server/README.md": "architecture.md",
    "qwen_serve/server/engine/prefix_cache/README.md": "prefix-caching.md",
    "quant_recipes/README.md": "recipes.md",
    "patches/README.md": "patches.md",
    "patches/moving-the-pin.md": "moving-the-pin.md",
    **{
        f"patches/topics/{path.name}": f"patches-{path.name}"
        for path in sorted((ROOT / "patches/topics").glob("*.md"))
    },
    "models/nano/README.md": "nano.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""File of the tree -> page of the site."""

COMMUNITY = "results/community/README.md"

MADE = {
    "qwen_serve/server/engine/settings.py": "settings.md",
    "qwen_serve/server/api/observe/metrics.py": "metrics.md",
}
"""Where a page is made from code, the file that a link names in the tree."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)")
BADGE = re.compile(r"^\[!\[.*\n", re.MULTILINE)
NAMED = re.compile(r"^( *```\w+) [\w.-]+$", re.MULTILINE)
"""A fence with a snippet's name after its language, which superfences would not take for a fence."""

DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def drawn(match: re.Match[str]) -> str:
    """A diagram's picture, which docs/draw.py has drawn; its source where that has not run since a change."""
    name = f"pictures/diagram-{hashlib.sha256(match[1].encode()).hexdigest()[:12]}.svg"
    return f"![Diagram]({name})" if (ROOT / "docs" / name).is_file() else f"```text\n{match[1]}```"


def relinked(text: str, file: str) -> str:
    """The text of `file`, whose links are right on the site."""

    def turned(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        page = PAGES.get(path) or MADE.get(path) or PAGES.get(f"{path}/README.md")
        if page is None and path.startswith("docs/"):
            page = path.removeprefix("docs/")
        return f"{image}[{label}]({page}{anchor or ''})" if page else label

    return DIAGRAM.sub(drawn, LINK.sub(turned, NAMED.sub(r"\1", BADGE.sub("", text))))


def table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def settings_page() -> str:
    """Every setting, by group. The class keeps defaults on one line (site.css)."""
    text = [
        "# Settings",
        "Each setting is a flag (`--ctx-size 8192`), an environment variable (`QWEN_CTX_SIZE=8192`) and a "
        "key of the TOML file that `--config` names (`ctx_size = 8192`). A flag takes precedence over the "
        "environment, the environment over the file, and the file over a [variant](variants.md) "
        "(`--variant`). `--print-settings` prints the settings in effect as such a file, with their sources.",
        "What is on or off has two flags, `--thinking` and `--no-thinking`; elsewhere it is `true` or "
        "`false`. Lists are separated by commas. An unknown name is an error that suggests a similar one. "
        "[Serving](serving.md#settings) says which setting to use for what.",
    ]
    for title, about, settings in described_settings():
        rows = [
            [f"`--{name.replace('_', '-')}`", default and f"`{default}`", help]
            for name, default, help in settings
        ]
        told = table(["flag", "default", "what it does"], rows)
        text += [f"## {title}", about, f'<div class="settings" markdown>\n\n{told}\n</div>']
    return "\n\n".join(text)


def metrics_page() -> str:
    """Every metric of /metrics but those of the process."""
    idle = EngineStats(0, 0, 0, 0, 0, 0, 0, 0)
    families = text_string_to_metric_families(Metrics().render(idle).decode())
    rows = [
        [f"`{one.name}`", one.type, one.documentation] for one in families if one.name.startswith("qwen_")
    ]
    return (
        "# Metrics\n\n`GET /metrics` answers in Prometheus' text format. Counters end in `_total` there.\n\n"
        + table(["metric", "kind", "what it counts"], rows)
    )


for source, page in PAGES.items():
    with mkdocs_gen_files.open(page, "w") as out:
        out.write(relinked((ROOT / source).read_text(encoding="utf-8"), source))
for path in (ROOT / "docs").glob("*.md"):
    with mkdocs_gen_files.open(path.name, "w") as out:
        out.write(relinked(path.read_text(encoding="utf-8"), f"docs/{path.name}"))
for page, text in {"settings.md": settings_page(), "metrics.md": metrics_page()}.items():
    with mkdocs_gen_files.open(page, "w") as out:
        out.write(text)
with mkdocs_gen_files.open(COMMUNITY, "w") as out:
    page = ROOT / "docs" / COMMUNITY
    out.write(page.read_text(encoding="utf-8") + "\n" + community(records_in(page.parent)))
