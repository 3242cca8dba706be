"""Puts data that lies beside the packages in a checkout into them, where qwen_serve/server/about.py looks."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA = {
    "qwen_serve/convert/quant_recipes": ("quant_recipes", ["**/*"]),
    "qwen_serve/server/chat_templates": ("chat_templates", ["*"]),
    "qwen_serve/server/variants": ("variants", ["*.toml"]),
    "qwen_serve/server/patches": ("patches", ["*.cmake", "llama.cpp/*.patch"]),
    "qwen_serve/server/native": ("native", ["**/*"]),
    "qwen_serve/server/models/nano": ("models/nano", ["*"]),
}
"""Folder in the wheel -> folder here, and which of its files."""


class BuildWithData(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for target, (folder, patterns) in DATA.items():
            source = Path(__file__).parent / folder
            for path in (path for pattern in patterns for path in source.glob(pattern) if path.is_file()):
                copy = Path(self.build_lib) / target / path.relative_to(source)
                self.mkpath(str(copy.parent))
                self.copy_file(str(path), str(copy))


setup(cmdclass={"build_py": BuildWithData})
