"""Draws the pages' Mermaid diagrams into docs/pictures/: python docs/draw.py. So the site fetches no script.

Needs npm, which fetches Mermaid, and Chromium with playwright (the extra dev). A diagram's file is named
after its source, so that a changed one is drawn again; others are removed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
PAGES = ("server/README.md",)
MERMAID = "mermaid@11.17.2"
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DRAW = """async (source) => {
  mermaid.initialize({
    startOnLoad: false, theme: "neutral", htmlLabels: false,
    flowchart: { htmlLabels: false, useMaxWidth: false },
    fontFamily: "system-ui, sans-serif", securityLevel: "strict", deterministicIds: true,
  });
  return (await mermaid.render("diagram", source)).svg;
}"""


def main() -> int:
    """Draws what is not drawn; returns the exit status."""
    sources = [
        source for page in PAGES for source in DIAGRAM.findall((ROOT / page).read_text(encoding="utf-8"))
    ]
    files = {
        PICTURES / f"diagram-{hashlib.sha256(one.encode()).hexdigest()[:12]}.svg": one for one in sources
    }
    for path in PICTURES.glob("diagram-*.svg"):
        if path not in files:
            path.unlink()
    wanted = {path: source for path, source in files.items() if not path.exists()}
    if not wanted:
        return 0
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        subprocess.run(
            ["npm", "pack", "--silent", MERMAID], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as packed:
            packed.extractall(folder, filter="data")
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.set_content("<!doctype html><body></body>")
        page.add_script_tag(path=Path(folder) / "package/dist/mermaid.min.js")
        for path, source in wanted.items():
            path.write_text(page.evaluate(DRAW, source) + "\n", encoding="utf-8")
            print(path.relative_to(ROOT))
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
