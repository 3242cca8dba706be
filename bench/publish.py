"""The end of every verb: save the result, show its tables, draw its picture."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bench.options import picture_path
from bench.results import ResultFile
from bench.table import Table

Result = TypeVar("Result", bound=ResultFile)


def publish(
    result: Result,
    args: argparse.Namespace,
    tables: Callable[[Result], list[Table]],
    draw: Callable[[Result, Path], None],
) -> None:
    """Save first, so that nothing later can lose the result; then tables, picture, and where they lie."""
    if args.out is not None:
        result.save(args.out)
    print("\n\n".join(str(table) for table in tables(result)))
    picture = picture_path(args)
    if picture is not None:
        draw(result, picture)
    for path in filter(None, (args.out, picture)):
        print(f"wrote {path}")
