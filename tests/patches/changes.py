"""The changes to llama.cpp, as the patches' headers name them."""

import re
from pathlib import Path


def changes(queue: Path) -> list[str]:
    """The names of the changes in a folder's patches, in order."""
    return [name for patch in sorted(queue.glob("*.patch")) for name in changes_of(patch)]


def changes_of(patch: Path) -> list[str]:
    """Those of one patch, which its header lists in one line."""
    header = patch.read_text(encoding="utf-8").partition("\ndiff --git ")[0]
    [line] = re.findall(r"^Changes: (.+)$", header, re.MULTILINE)
    return line.split()
