"""Tables, on the terminal and in Markdown, and the progress bar."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.table import Table as RichTable

from qwen_serve.convert.progress import Progress

Cell = str | int | float | None

FULL_WIDTH = 240  # columns, if stdout is not a terminal


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header. The first column and columns of text are left-aligned, figures right-aligned.

    A float is shown with three significant digits or in full thousands, None (not measured) as a dash.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Cell]], *, title: str = "", notes: Sequence[str] = ()) -> Self:
        """A table of ``lines``, each a mapping from column to value. Columns without any value are left
        out."""
        columns = dict.fromkeys(name for line in lines for name in line)
        known = [name for name in columns if any(line.get(name) is not None for line in lines)]
        return cls(known, [[line.get(name) for name in known] for line in lines], title, notes)

    def print(self) -> None:
        """Print to stdout, at the terminal's width, or unwrapped into a file."""
        console = Console(highlight=False, width=None if sys.stdout.isatty() else FULL_WIDTH)
        made = RichTable(box=None, header_style="bold")
        for number, name in enumerate(self.header):
            made.add_column(name, justify="left" if self.is_text(number) else "right")
        for row in self.rows:
            made.add_row(*(show(cell) for cell in row))
        if self.title:
            console.print(self.title, style="italic", markup=False, soft_wrap=True)
        console.print(made, markup=False)
        for note in self.notes:
            console.print(f"  {note}", markup=False, soft_wrap=True)
        console.print()

    def markdown(self) -> str:
        """The table in Markdown, with title and notes as paragraphs."""
        rule = ["---" if self.is_text(number) else "---:" for number in range(len(self.header))]
        rows = [list(self.header), rule, *([show(cell) for cell in row] for row in self.rows)]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
        parts = [f"**{self.title}**"] if self.title else []
        return "\n\n".join([*parts, body, *self.notes]) + "\n"

    def is_text(self, column: int) -> bool:
        """Whether a column is left-aligned: the first one, and those that hold text."""
        cells = [row[column] for row in self.rows]
        return column == 0 or any(isinstance(cell, str) and not cell[:1].isdigit() for cell in cells)


def show(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        if cell == 0 or abs(cell) >= 100:
            return f"{cell:,.0f}"
        digits = 1 if abs(cell) >= 10 else 2 if abs(cell) >= 1 else 3
        return f"{cell:.{digits}f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


class Bar(Progress):
    """Progress on stderr: ``with Bar("short, official", total=50) as bar: bar.advance()``. A bar on a
    terminal, occasional lines in a log."""

    def __init__(self, what: str, *, total: int, unit: str = "requests") -> None:
        super().__init__(what, total, unit)

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count ``count`` more as done, and show ``note`` beside the bar."""
        self.note(note)
        super().advance(count)
