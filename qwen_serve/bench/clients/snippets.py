"""Reads the snippets of docs/clients.md."""

import re
from dataclasses import dataclass
from pathlib import Path

from qwen_serve.bench.errors import BenchError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "clients.md"
FENCE = re.compile(r"^```(\w+) ([\w-]+)\.(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SETUP = "setup"
URL = "http://127.0.0.1:8080"
TASKS = {"gsm8k": "clients_generate", "arc_easy": "clients_loglikelihood"}
"""Task of lm-eval on the page -> task that is run instead, which fetches no data set."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """A fenced block: ```python openai.chat"""

    client: str
    name: str
    language: str
    text: str

    @property
    def label(self) -> str:
        """client.name"""
        return f"{self.client}.{self.name}"

    def pointed_at(self, url: str, key: str | None, tasks: Path) -> str:
        """The text with another server's address, key and lm-eval tasks."""
        text = self.text.replace(URL, url)
        if key:
            text = re.sub(r'("|Bearer |TOKEN=|API_KEY=|-k )none\b', lambda found: found[1] + key, text)
        if self.client == "lm-eval":
            for documented, local in TASKS.items():
                text = text.replace(f"--tasks {documented}", f"--include_path {tasks} --tasks {local}")
        return text


def read_snippets(page: Path = PAGE) -> list[Snippet]:
    """The page's snippets, in order. A client's `setup` snippet is put before each of its others.

    Raises BenchError if the page is missing, as in an installed package.
    """
    if not page.is_file():
        raise BenchError(f"{page} is not there: run this from a checkout")
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    setups = {client: text for _, client, name, text in found if name == SETUP}
    return [
        Snippet(client, name, language, setups.get(client, "") + text)
        for language, client, name, text in found
        if name != SETUP
    ]
