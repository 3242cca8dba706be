"""Tables for the terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header. The first column is a label and stands left, figures stand right.

    A float is shown with three significant digits or in full thousands, None (not measured) as a dash.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        cells = [list(self.header), *([show(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.header))]
        left = [self._is_text(i) for i in range(len(self.header))]
        lines = [
            "  ".join(
                c.ljust(w) if text else c.rjust(w) for c, w, text in zip(row, widths, left, strict=True)
            ).rstrip()
            for row in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(
            [*([self.title] if self.title else []), *lines, *(f"  {note}" for note in self.notes)]
        )

    def markdown(self) -> str:
        """The same as a Markdown table, title and notes as paragraphs."""
        rule = ["---" if self._is_text(i) else "---:" for i in range(len(self.header))]
        rows = [list(self.header), rule, *([show(cell) for cell in row] for row in self.rows)]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
        parts = [f"**{self.title}**"] if self.title else []
        return "\n\n".join([*parts, body, *self.notes]) + "\n"

    def _is_text(self, column: int) -> bool:
        cells = [row[column] for row in self.rows]
        return column == 0 or any(isinstance(cell, str) and not cell[:1].isdigit() for cell in cells)


def show(cell: Cell) -> str:
    """One cell's text."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        if cell == 0 or abs(cell) >= 100:
            return f"{cell:,.0f}"
        digits = 1 if abs(cell) >= 10 else 2 if abs(cell) >= 1 else 3
        return f"{cell:.{digits}f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
