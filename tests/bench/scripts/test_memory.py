"""The table of what fits on a card, by the server's plan of a header alone."""

from pathlib import Path

import pytest

from qwen_serve.bench.errors import BenchError

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    import memory


def test_larger_cards_hold_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards of so many MB; the driver's margin alone is 256 MiB."""
    monkeypatch.setattr(memory, "GB", 10**6)
    table = memory.fits_table("small", ["Q4_K_M", "F16"], [200, 330, 2000], [1])
    assert [row[0] for row in table.rows] == ["Q4_K_M", "F16"]
    for row in table.rows:
        none, some, more = row[2:]
        assert none == ""
        assert 2048 <= int(str(some).replace(",", "")) < int(str(more).replace(",", ""))
    quantized, whole = (float(str(row[1])) for row in table.rows)
    assert 2.5 * quantized < whole


def test_an_unknown_quant_is_named() -> None:
    with pytest.raises(BenchError, match="--quants Q9: known are"):
        memory.memory(quants=("Q9",))
