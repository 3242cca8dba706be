"""What a server's own counters say of a stretch of work: the growth of its Prometheus counters."""

import re

from bench.errors import BenchError
from bench.load.client import Client

SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*(?:_total|_sum|_count)(?:\{[^}]*\})?) (?P<value>[-+.\deE]+)")

Counters = dict[str, float]


async def read_counters(client: Client) -> Counters:
    """Every counter of /metrics, labels included in its name; none where the server has no such page."""
    try:
        reply = await client.request("GET", "/metrics")
    except BenchError:
        return {}
    return parse_counters(reply.text) if reply.status == 200 else {}


def parse_counters(text: str) -> Counters:
    """The samples that only ever grow, out of the text format."""
    found = (SAMPLE.fullmatch(line.strip()) for line in text.splitlines())
    return {match["name"]: float(match["value"]) for match in found if match}


def growth(before: Counters, after: Counters) -> Counters:
    """By how much each counter grew; those that stood still are left out."""
    return {
        name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)
    }


def add(one: Counters, other: Counters) -> Counters:
    """The growth of two stretches together."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}
