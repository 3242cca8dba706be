"""The common style of charts: a headless matplotlib figure that is written at the end of the block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_serve.bench.errors import BenchError
from qwen_serve.common.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#666666")
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "figure.titlesize": 12,
    "font.size": 9.5,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: smaller and searchable
    "svg.hashsalt": "qwen-bench",  # the same data give the same bytes
}


@contextmanager
def figure(
    path: Path, *, title: str = "", rows: int = 1, columns: int = 1, width: float = 8.0, height: float = 4.5
) -> Iterator[Sequence["Axes"]]:
    """Axes to draw on, row by row. The chart is written to ``path``, whose suffix is png, svg or pdf.

    ``width`` and ``height``: in inches. Raises BenchError for another suffix, or if the file cannot be
    written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        drawing = Figure(figsize=(width, height), layout="constrained")
        if title:
            drawing.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=10.5)
        axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
        yield axes
        for axis in axes:
            if axis.get_ylim()[1] >= 1000 and axis.get_yscale() == "linear":
                axis.yaxis.set_major_formatter("{x:,.0f}")
        kind = path.suffix.removeprefix(".")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            undated = {"Date": None} if kind == "svg" else None
            with replacing(path) as part:
                drawing.savefig(part, format=kind or "png", dpi=130, metadata=undated)
        except (OSError, ValueError) as error:
            raise BenchError(f"{path}: the picture cannot be written: {error}") from error
