"""LaTeX in answers: recognition of formulas, and commands that are not allowed."""

from typing import Any

from tests.server.api.conftest import Start
from tests.server.page.driving import answered, ask

ANSWER = r"""
Let \(a^2 + b_1^*\) and *see $x*y$ here*, so

\[
\sum_{i=1}^n i
= \frac{n(n+1)}{2} \\[2pt]
- 0
\]
and in the middle $$\sqrt{2}$$ of a line.

- a list has $z_0$
  $$
  w = 1
  $$

| $t$ | b |
|:---:|--:|
| \(u\) | 2 |

`$code$` and \$1.

```tex
\(fenced\) $$fenced$$
```
"""
FORMULAS = ["a^2", "x*y", "\\sum_{i=1}^n", "\\sqrt{2}", "z_0", "w = 1", "t", "u"]


def formulas(answer: Any) -> list[str]:
    """The LaTeX behind each rendered formula, as its MathML keeps it for a screen reader."""
    return [text.strip() for text in answer.locator(".katex annotation").all_text_contents()]


def test_formulas_are_rendered(start: Start, page: Any) -> None:
    page.goto(start("</think>\n" + ANSWER).url)
    answer = answered(page, "Math?")
    found = formulas(answer)
    assert len(found) == len(FORMULAS), found
    assert all(text.startswith(begin) for text, begin in zip(found, FORMULAS, strict=True)), found
    assert answer.locator(".math.display").count() == 3
    assert answer.locator("li .math.display").count() == 1
    assert answer.locator("em").inner_text().endswith("here")
    assert answer.locator("p code").inner_text() == "$code$"
    assert answer.locator(".block pre").inner_text().strip() == "\\(fenced\\) $$fenced$$"
    assert answer.locator(".math.bad").count() == 0
    # the page's policy lets KaTeX's styles through, and its fonts
    assert answer.locator(".katex-html [style]").count() > 5
    raised = answer.locator(".katex-html .vlist > span").first
    assert raised.evaluate("span => span.style.top !== '' && getComputedStyle(span).top !== 'auto'")
    assert page.evaluate("document.fonts.load('1rem KaTeX_Main').then((found) => found.length)") == 1


PRICES = [
    "$5 and $10",
    "between $5-$10, or 5$ and 10$ more",
    "$20 for one (was $30), 15$ for two",
    "$100 for A and 200$ for B",
    "US$5 or AU$ 7",
    "$HOME and $PATH",
    "costs $$ and more $",
    "a \\$1 and a \\$2",
    "$ x $",
    "[1] (2) \\[no link\\](https://example.com)",
]
BAD = [
    (r"\(\frac{1}\)", r"\(\frac{1}\)"),
    (r"$\begin{matrix} 1$", r"$\begin{matrix} 1$"),
    ("$$" + "{" * 9_000 + "$$", "{" * 9_000),
    ("$$" + "x" * 10_001 + "$$", "x" * 10_001),
    (r"$\def\a{\a\a}\a$", r"\def\a{\a\a}\a"),
]


def test_prices_variables_and_what_cannot_be_rendered_stay_text(start: Start, page: Any) -> None:
    answers = iter([*PRICES, *(source for source, _ in BAD)])
    page.goto(start(lambda _: "</think>\n\n" + next(answers), context_size=60_000).url)
    for text in PRICES:
        answer = answered(page, "How much?")
        assert answer.locator(".math").count() == 0, text
        assert answer.locator(".markdown").inner_text() == text.replace("\\", "")
    for _, shown in BAD:
        bad = answered(page, "Math?").locator(".math.bad")
        assert shown in bad.inner_text()
        assert bad.get_attribute("title")


def test_a_formula_that_is_not_complete_is_text_as_it_came(start: Start, page: Any) -> None:
    """Markdown does not touch it: no emphasis comes and goes."""
    begun = r"So \[ a_1 * b_1 * c_1 + \frac{x_1}{y_1} \\"
    page.goto(start("</think>\n\n" + begun + " " * 3000, delay=0.01).url)
    answer = ask(page, "Math?")
    markdown = answer.locator(".markdown")
    while (text := markdown.inner_text().strip()) != begun:  # what is there so far
        assert begun.startswith(text)
        page.wait_for_timeout(20)
    assert answer.locator("em, .math").count() == 0
    page.keyboard.press("Escape")
    answer.locator(".figures").wait_for()


HOSTILE = r"""
$\href{javascript:document.title='owned'}{a}$ $\url{javascript:alert(1)}$
$\includegraphics{https://example.com/x.png}$ $\htmlStyle{position:fixed}{b}$ $\htmlId{input}{c}$
$\text{<img src=x onerror=document.title='owned'>}$ \(</span><script>document.title='owned'</script>\)
<span data-math>\href{#x}{x}</span> <math><mtext><b>d</b></mtext></math>
$$\rule{9999em}{9999em} \kern9999em x$$
"""


def test_a_formula_makes_no_links_and_runs_nothing(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\n" + HOSTILE).url)
    answer = answered(page, "Math?")
    page.wait_for_timeout(200)
    assert page.title() != "owned"
    assert answer.locator(".markdown :is(a, img, script, b, iframe)").count() == 0
    assert answer.locator("#input, [onerror]").count() == 0
    styles = answer.locator(".markdown [style]").evaluate_all("all => all.map(e => e.style.position)")
    assert "fixed" not in styles
    assert page.locator("#log").evaluate("log => log.scrollHeight") < 4000
    assert page.locator("body").evaluate("body => body.scrollWidth <= innerWidth")
