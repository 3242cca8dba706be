"""Limits of a searched recipe: a size, bits per weight, a time a token, a divergence."""

import re
from dataclasses import dataclass

from qwen_serve.convert.cards import BANDWIDTH

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Target:
    """Upper limits; None for those not requested.

    With a `divergence` [nats] the search finds the smallest file (on a `card`, the fastest) within all
    limits, otherwise the least divergence within the limits.
    """

    n_bytes: int | None = None
    bits_per_weight: float | None = None
    milliseconds: float | None = None
    divergence: float | None = None
    card: str | None = None

    @property
    def label(self) -> str:
        """For file names: `auto-4.0MB`, `auto-3.2ms-A10G`."""
        parts = ["auto"]
        if self.n_bytes is not None:
            parts.append(spell_size(self.n_bytes))
        if self.bits_per_weight is not None:
            parts.append(f"{self.bits_per_weight:g}bpw")
        if self.divergence is not None:
            parts.append(f"kld{self.divergence:g}")
        if self.milliseconds is not None:
            parts.append(f"{self.milliseconds:g}ms")
        if self.card is not None:
            parts.append(self.card)
        return "-".join(parts)

    def problem(self) -> str | None:
        """What is wrong with the combination, or None."""
        limits = (self.n_bytes, self.bits_per_weight, self.milliseconds, self.divergence)
        if all(limit is None for limit in limits):
            return (
                "--quant auto wants a target: --target-size 2.4GB, --target-bpw 4.5, --target-kld 0.01, "
                "or --target-ms 4.5 with --for"
            )
        if self.milliseconds is not None and self.card is None:
            return f"--target-ms wants a card: --for {' or '.join(BANDWIDTH)}"
        if self.card is not None and self.milliseconds is None and self.divergence is None:
            return (
                "--for decides by the time that a token takes: give --target-ms (the least divergence within "
                "it) or --target-kld (the fastest file under it); --target-size and --target-bpw then are "
                "limits beside it"
            )
        return None


def parse_size(text: str) -> int:
    """Bytes of `2.4GB`, `900 MiB`. Raises ValueError that says what would be right."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]+)\s*", text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise ValueError(f"want a number and a unit ({', '.join(UNITS)}), such as 2.4GB; got {text!r}")
    n_bytes = int(float(found[1]) * units[found[2].lower()])
    if n_bytes < 1:
        raise ValueError(f"must be more than nothing, got {text!r}")
    return n_bytes


def spell_size(n_bytes: int) -> str:
    """Decimal and exact: 4.0MB, 2.435GB, 4.661664MB."""
    unit = "GB" if n_bytes >= UNITS["GB"] else "MB" if n_bytes >= UNITS["MB"] else "kB"
    number = f"{n_bytes / UNITS[unit]:.9f}".rstrip("0")
    return number + ("0" if number.endswith(".") else "") + unit
