"""Goodput: requests a second within given limits (DistServe, OSDI 2024; `vllm bench serve --goodput`)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

UNITS = {"ms": 1.0, "s": 1000.0}
NAMES = {"ttft": "ttft", "itl": "itl", "tpot": "itl", "e2el": "latency", "latency": "latency"}
LIMIT = re.compile(r"(?P<name>\w+)[=:](?P<value>\d+(?:\.\d+)?)(?P<unit>ms|s)?")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in milliseconds, by metric. A request is good if it exceeds none."""

    milliseconds: Mapping[str, float]

    def kept_by(self, values: Mapping[str, float]) -> bool:
        """Whether a request's values are known and within their limits.

        An answer of one token has no ITL, so it keeps every limit of it.
        """
        if "failed" in values:
            return False
        lacking = {"itl"} if values.get("verified_tokens", 0) <= 1 else set()
        return all(
            name in lacking or values.get(name, float("inf")) <= limit
            for name, limit in self.milliseconds.items()
        )

    def __str__(self) -> str:
        return ",".join(f"{name}={limit:g}ms" for name, limit in self.milliseconds.items())


def read_limits(text: str) -> Limits:
    """Parse limits such as ``ttft=500ms,itl=50ms``; without a unit they are in milliseconds. Raises
    ValueError with what is allowed."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        match = LIMIT.fullmatch(part.strip())
        if match is None or match["name"] not in NAMES:
            raise ValueError(f"{part}: want {', '.join(NAMES)} = a time, such as ttft=500ms,itl=50ms")
        found[NAMES[match["name"]]] = float(match["value"]) * UNITS[match["unit"] or "ms"]
    if not found:
        raise ValueError("want at least one limit, such as ttft=500ms")
    return Limits(found)
