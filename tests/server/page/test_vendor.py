"""The page's third-party files."""

import re

from qwen_serve.server.api.page import FOLDER

VERSIONS = {
    "marked.umd.js": "marked v",
    "purify.min.js": "DOMPurify ",
    "highlight.min.js": "v",
    "katex.min.js": 'version:"',
    "pdf.min.mjs": "pdfjsVersion = ",
    "pdf.worker.min.mjs": "pdfjsVersion = ",
}
"""What stands before the version in each."""


def test_the_readme_names_the_vendored_versions() -> None:
    readme = (FOLDER / "README.md").read_text()
    for file, before in VERSIONS.items():
        [row] = [line for line in readme.splitlines() if line.startswith(f"| `{file}`")]
        assert before + row.split("|")[3].strip() in (FOLDER / "vendor" / file).read_text()


def test_every_file_of_others_has_its_licence() -> None:
    names = {path.name.partition(".")[0] for path in (FOLDER / "vendor").glob("*.*s")}
    licences = {path.name.partition(".")[0] for path in (FOLDER / "vendor").glob("*.LICENSE")}
    assert {name.replace("purify", "dompurify") for name in names} == licences


def test_the_fonts_are_those_that_the_style_names() -> None:
    style = (FOLDER / "vendor" / "katex.min.css").read_text()
    named = set(re.findall(r"url\(fonts/([^)]+\.woff2)\)", style))
    assert named == {path.name for path in (FOLDER / "vendor" / "fonts").iterdir()}
