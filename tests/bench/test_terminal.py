"""Tables are aligned, have three significant digits, and show a dash for values that were not measured."""

import pytest

from qwen_serve.bench.terminal import Table, show

TABLE = Table(
    ["category", "ms", "share"],
    [["short", 12.345, "98%"], ["a|b", 1234.5, None], ["long", 7, "0%"]],
    title="Latency",
    notes=["one note"],
)


def test_cells() -> None:
    shown = [show(cell) for cell in (None, 0.0, 0.01234, 1.234, 12.34, 123.4, 12345.6, 12345, "text")]
    assert shown == ["-", "0", "0.012", "1.23", "12.3", "123", "12,346", "12,345", "text"]


def test_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    TABLE.print()
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "Latency",
        " category     ms  share",
        " short      12.3    98%",
        " a|b       1,234      -",
        " long          7     0%",
        "  one note",
        "",
    ]


def test_markdown() -> None:
    assert TABLE.markdown().splitlines() == [
        "**Latency**",
        "",
        "| category | ms | share |",
        "| --- | ---: | ---: |",
        "| short | 12.3 | 98% |",
        "| a\\|b | 1,234 | - |",
        "| long | 7 | 0% |",
        "",
        "one note",
    ]
