"""Tables in answers."""

from typing import Any

import pytest

from tests.server.api.conftest import Start
from tests.server.page.driving import answered

WIDE = """</think>

| Country | Administrative capital | Constitutional arrangement | Internationalization |
|:--------|:----------------------:|---------------------------:|----------------------|
| Bolivia | Sucre                  | unitary                    | extraterritoriality  |
"""


def test_columns_are_aligned_as_the_answer_says(start: Start, page: Any) -> None:
    page.goto(start(WIDE).url)
    cells = answered(page, "Table?").locator("th, td")
    aligned = cells.evaluate_all("all => all.map(cell => getComputedStyle(cell).textAlign)")
    named = [name.removeprefix("-webkit-") for name in aligned]
    assert named == ["left", "center", "right", "start"] * 2


@pytest.mark.slow
def test_a_wide_table_scrolls_and_breaks_no_words(start: Start, page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    page.goto(start(WIDE).url)
    answer = answered(page, "Table?")
    frame = answer.locator(".table")
    assert frame.evaluate("frame => frame.scrollWidth > frame.clientWidth")
    assert page.locator("body").evaluate("body => body.scrollWidth <= innerWidth")
    words = answer.get_by_text("extraterritoriality")
    lines = "cell => (r => (r.selectNodeContents(cell), r.getClientRects().length))(document.createRange())"
    assert words.evaluate(lines) == 1
