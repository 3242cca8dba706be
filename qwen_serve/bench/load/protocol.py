"""The published protocols of the competition and the hackathon: categories, levels and their scores."""

from collections.abc import Mapping
from dataclasses import dataclass

FILLER = "The quick brown fox jumps over the lazy dog. "
FILLER_TOKENS = 10

OFFICIAL, DISTINCT, IMAGES = "official", "distinct", "images"


@dataclass(frozen=True, slots=True)
class Category:
    """A category of the latency protocol: tokens in (nominal) and out, and the published baseline in ms (BF16
    on an A10G)."""

    name: str
    prompt_tokens: int
    max_tokens: int
    official_ms: float

    @property
    def filler(self) -> str:
        return FILLER * (self.prompt_tokens // FILLER_TOKENS)


CATEGORIES = {
    category.name: category
    for category in (
        Category("short", 64, 128, 2582.0),
        Category("medium", 2048, 256, 5441.0),
        Category("long", 8192, 256, 6576.0),
    )
}

ALL_CATEGORIES = tuple(CATEGORIES.values())

# The hackathon's concurrency level -> its weight in the score.
WEIGHTS: Mapping[int, int] = {1: 1, 2: 1, 4: 2, 8: 2, 16: 4, 32: 4, 64: 8}
TOKENS, REQUESTS, WARM_UPS = 1024, 64, 2


def category(name: str) -> Category:
    """The category of that name. Raises ValueError, which lists the known ones."""
    if name not in CATEGORIES:
        raise ValueError(f"{name}: want some of {', '.join(CATEGORIES)}")
    return CATEGORIES[name]


def at_concurrency(level: int) -> str:
    """The cell's name for a closed loop."""
    return f"{level} concurrent"


def at_rate(rate: float) -> str:
    """The cell's name for an open loop."""
    return f"{rate:g} req/s"
