"""Pages, workflows, the Makefile and Dockerfiles name paths that git has."""

import posixpath
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.tree import ROOT, files, git, paths

OF_THE_PAST = ("CHANGELOG.md", "docs/results/")
"""Their links lead somewhere, but they name what was there."""
OF_LLAMA_CPP = "patches/upstream/"
"""They speak of another tree."""
DOORS = ("server", "convert", "bench")
WORD = re.compile(r"(?<![\w/$.~:)}>*-])\.?[\w*][\w.*-]*(?:/[\w.*-]+)+")
OURS = (".py", ".md", ".toml", ".sh", ".jinja", ".cmake", ".patch", ".yaml")
"""Endings by which a word with a slash is a file of this tree, wherever it begins."""
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
PAGES = [
    path
    for path in files()
    if path.endswith(".md")
    or path.startswith((".github/", ".ci/", "deploy/"))
    or Path(path).name.startswith(("Dockerfile", "Makefile", "MANIFEST.in", ".dockerignore"))
]


def is_there(word: str, page: str) -> bool:
    """Whether git has a path as a page names it: relative to the tree, to the page's folder or top folder,
    or on a door's page to the package."""
    folder, top = posixpath.dirname(page), page.partition("/")[0]
    places = ["", folder, top, *(f"qwen_serve/{door}" for door in DOORS if folder == door)]
    found = [posixpath.normpath(posixpath.join(place, word)) for place in places]
    if "*" in word:
        return any(fnmatch(path, pattern) for pattern in found for path in paths())
    return any(path in paths() for path in found)


def missing_words(page: str, text: str) -> set[str]:
    """Paths in a text that git does not have. What is made here, git ignores."""
    if page.startswith((*OF_THE_PAST, OF_LLAMA_CPP)):
        return set()
    top = {path.partition("/")[0] for path in paths()}
    words = {word.rstrip(".-") for word in WORD.findall(text) if "NN" not in word}  # stands for a number
    named = {word for word in words if word.partition("/")[0] in top or word.endswith(OURS)}
    if page.startswith("patches/"):  # C++ is llama.cpp's there
        named = {word for word in named if not re.search(r"\.(c|cpp|h|hpp|cu|cuh)$", word)}
    gone = {word for word in named if not is_there(word, page)}
    return gone - {*git("check-ignore", "--no-index", "--stdin", given="\n".join(gone))}


def missing_links(page: str, text: str) -> set[str]:
    if not page.endswith(".md"):
        return set()
    targets = (posixpath.join(posixpath.dirname(page), target) for target in LINK.findall(text))
    return {posixpath.normpath(target) for target in targets} - paths() - {"."}


@pytest.mark.parametrize("page", PAGES)
def test_paths_are_in_git_s_tree(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert missing_words(page, text) | missing_links(page, text) == set()


@pytest.mark.parametrize(
    "text", ["`server/engine/engine.py`", "COPY llamacpp/model.py ./", "tests/no/*.py", "bench/load/"]
)
def test_a_path_that_is_missing_is_found(text: str) -> None:
    assert missing_words("docs/serving.md", text)


@pytest.mark.parametrize(
    "text", ["models/mine.gguf", "`qwen_serve/server/cli.py`", "tests/*.py", "prefill/decode", "/bench/x"]
)
def test_others_are_not(text: str) -> None:
    assert not missing_words("docs/serving.md", text)


def test_no_file_is_a_link() -> None:
    """In a checkout without links, as on Windows, each would be a text file."""
    assert [line for line in git("ls-files", "--stage") if line.startswith("120000")] == []
