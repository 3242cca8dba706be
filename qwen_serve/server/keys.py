"""API keys, and their rights in the queue."""

from dataclasses import dataclass
from pathlib import Path

from qwen_serve.server.engine.request import TIERS, ServiceTier

FORMAT = "a line is a key, then, if need be, `class=` priority, default or flex and `share=` 0.001 to 1000"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients may send."""

    key: str
    service_tier: ServiceTier = "default"
    """The default tier of its requests, and the highest that they may ask for."""
    share: float = 1.0
    """Its share of the server's time, relative to others' shares."""


def read_keys(path: Path) -> list[ApiKey]:
    """The keys in a file: one a line; blank lines and comments are skipped. Raises ValueError."""
    lines = (line.partition("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines())
    return [_read(words, f"{path}, line {number}") for number, words in enumerate(lines, 1) if words]


def _read(words: list[str], where: str) -> ApiKey:
    key, *options = words
    tier, share = "default", "1"
    for option in options:
        name, _, value = option.partition("=")
        if name == "class" and value in TIERS:
            tier = value
        elif name == "share" and _is_share(value):
            share = value
        else:  # the message leaves out the option, which may be part of a key
            what = f"{name}= " if name in ("class", "share") else ""
            raise ValueError(f"{where}: {what}cannot be used; {FORMAT}")
    return ApiKey(key, next(known for known in TIERS if known == tier), float(share))


def _is_share(value: str) -> bool:
    try:
        share = float(value)
    except ValueError:
        return False
    return 0.001 <= share <= 1000
