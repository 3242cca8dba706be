"""What the commands that measure this machine share: their flags, the model, and where results go."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .llama import Model, devices, supports_gpu

if TYPE_CHECKING:
    from collections.abc import Callable


def cost_parser(prog: str, description: str | None, times: int) -> argparse.ArgumentParser:
    """A parser for MODEL, --times and --out."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("model", type=Path, metavar="GGUF")
    parser.add_argument(
        "--times", type=int, default=times, metavar="N", help="runs, of which the median counts"
    )
    parser.add_argument("--out", type=Path, metavar="JSON")
    return parser


def publish(flags: argparse.Namespace, measure: Callable[[Model], dict[str, Any]]) -> None:
    """Load the model, measure, print, and write JSON where `--out` says."""
    model = Model(flags.model, n_gpu_layers=-1 if supports_gpu() else 0)
    try:
        result = {"model": flags.model.name, "device": devices()[0].description, **measure(model)}
    finally:
        model.close()
    text = json.dumps(result, indent=1)
    print(text)
    if flags.out:
        partial = flags.out.with_suffix(".part")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(flags.out)
