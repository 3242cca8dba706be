"""What a model or an imported file says is shown and never run: markup, links, formulas, names of things."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.server.api.conftest import Start
from tests.server.api.fakes import FakeVocab
from tests.server.page.driving import answered

RUN = "document.title='owned'"
ELEMENTS = [
    f"<script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f'<svg onload="{RUN}"><script>{RUN}</script></svg>',
    f'<iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
    f'<iframe src="javascript:parent.{RUN}"></iframe>',
    f'<a href="javascript:{RUN}" autofocus onfocus="{RUN}">x</a>',
    f'<details open ontoggle="{RUN}">x</details>',
    f'<form action="https://example.com"><input name=x><button formaction="javascript:{RUN}">x</form>',
    "<form id=log><input name=children></form><img name=getElementById>",
    f'<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror={RUN}&gt;">',
    f'<noscript><p title="</noscript><img src=x onerror={RUN}>">',
    f'<template><script>{RUN}</script></template><object data="data:text/html,<script>{RUN}</script>">',
    '<meta http-equiv=refresh content="0;url=https://example.com"><base href="https://example.com/">',
    '<link rel=stylesheet href="https://example.com/x.css"><style>@import "https://example.com/y.css";</style>',
    '<video src="https://example.com/v.mp4" autoplay></video><img srcset="https://example.com/x.png 1x">',
    f'<div style="background:url(https://example.com/z.png);position:fixed;inset:0" onclick="{RUN}">x</div>',
]
LINKS = [
    f"[x](javascript:{RUN})",
    f"[x](JaVaScRiPt&colon;{RUN})",
    f"[x](java\tscript:{RUN})",
    f"[x](data:text/html;base64,PHNjcmlwdD4=) [y](vbscript:{RUN}) [z](blob:https://example.com/1)",
    f'[x](<javascript:{RUN}> "t") ![x](javascript:{RUN})',
    f"[r]: javascript:{RUN}\n\n[r]",
    f"<javascript:{RUN}> <https://example.com/auto>",
    '![x](https://example.com/p.png "x") ![x](//example.com/p.png) ![x](\\\\example.com\\p.png)',
    '[x](https://example.com/"onmouseover="' + RUN + ")",
]
FORMULAS = [
    f"$\\href{{javascript:{RUN}}}{{x}}$ $\\url{{javascript:{RUN}}}$",
    "$\\includegraphics{https://example.com/x.png}$",
    f"$\\htmlData{{x=y}}{{z}} \\htmlClass{{block}}{{z}} \\text{{{ELEMENTS[1]}}}$",
    "$\\def\\a{\\a\\a}\\a$ $\\gdef\\x{\\x}\\x$",
    "$$" + "\\frac{1}{" * 300 + "x" + "}" * 300 + "$$",
    f"```html\n{ELEMENTS[0]}\n```\n\n```{ELEMENTS[1]}\nx\n```",
    f"| a | {ELEMENTS[1]} |\n|---|---|\n| {LINKS[0]} | {ELEMENTS[0]} |",
    "$$" + "\\sqrt{" * 300 + "x" + "}" * 300 + "$$",
    "> " * 200 + "$" + "x^{" * 60 + "x" + "}" * 60 + "$",
    "> " * 300 + ELEMENTS[0],
    "- " * 3000 + ELEMENTS[0],
    "- " * 300 + ELEMENTS[1],
    "[" * 2000 + "x" + "](y)" * 2000,
    "\u202e" + ELEMENTS[0] + "\u2066\x00\x1b[2J",
]
WRAPPED = ["{}", "**{}**", "1. {}\n\n   {}", "</think>{}<think>", "`{}` {}"]
HOSTILE = [each.replace("{}", payload) for each, payload in product(WRAPPED, [*ELEMENTS, *LINKS, *FORMULAS])]
N = 12
"""Payloads in one answer."""
N_SHOWN = 44
"""Messages of an imported conversation."""


def nothing_ran(page: Any) -> None:
    """Nothing was run, and nothing is there that could be."""
    assert page.title() != "owned"
    log = page.locator("#log")
    bad = "script, iframe, object, embed, form, input:not([type=checkbox]), link, meta, base, style, video"
    assert log.locator(f":is(.markdown, .calls) :is({bad})").count() == 0
    assert log.locator("img:not([src^='data:']):not([src^='blob:'])").count() == 0
    risky = "[onerror], [onload], [onclick], [onfocus], [ontoggle], [onmouseover], [formaction], [srcdoc]"
    assert log.locator(risky).count() == 0
    links = log.locator("a[href]").evaluate_all("all => all.map(a => a.protocol)")
    assert set(links) <= {"http:", "https:", "mailto:", "blob:", "data:"}, set(links)
    styles = log.locator(".markdown [style]").evaluate_all("all => all.map(e => e.style.position)")
    assert "fixed" not in styles
    assert page.locator("#input").count() == 1
    assert page.url.startswith("http://127.0.0.1:")


def test_there_are_many() -> None:
    assert len(HOSTILE) > 150


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_model_says_is_not_run(start: Start, page: Any) -> None:
    parts = [HOSTILE[at : at + N] for at in range(0, len(HOSTILE), N)]
    said = iter(parts)

    def answer(_: str) -> list[int]:
        text = "\n\n".join(next(said, ["x"]))
        return [*FakeVocab().tokenize("Hm. " + text + "\n</think>\n\n" + text, special=True)]

    page.goto(start(answer, context_size=10**7).url)
    for at in range(len(parts)):
        answered(page, parts[at][0])
        nothing_ran(page)
    page.reload()
    page.locator(".message.assistant").nth(len(parts) - 1).wait_for()
    nothing_ran(page)


def message(at: int, text: str) -> dict[str, Any]:
    role = "user" if at % 2 == 0 else "assistant"
    call = {"id": text, "name": text, "arguments": text, "result": text}
    made = {"role": role, "content": text, "reasoning": text, "created": at, "calls": [call]}
    return {**made, "id": f"{at}", "parent": f"{at - 1}" if at else None, "figures": text, "problem": text}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_file_says_is_not_run(start: Start, page: Any, tmp_path: Path) -> None:
    """Imported conversations: in every text that is shown, tool results too, and with fields of any kind."""
    page.goto(start("x").url)
    format_ = "qwen-serve conversations"
    odd: list[Any] = [None, 5, [], {}, "__proto__", {"__proto__": {"title": "owned"}}, "x" * 100_000]
    conversations: list[dict[str, Any]] = [
        {
            "id": "a",
            "title": ELEMENTS[1],
            "messages": [message(at, text) for at, text in enumerate(HOSTILE[:N_SHOWN])],
        },
        *({"id": value, "title": value, "messages": [message(0, "x")], "__proto__": value} for value in odd),
        *(
            {"title": "x", "messages": [{**message(0, "x"), name: value}]}
            for name in ("role", "content", "parent", "created", "pictures", "files", "calls")
            for value in odd
        ),
        {"title": "circle", "messages": [{**message(at, "x"), "parent": f"{1 - at}"} for at in (0, 1)]},
        {"title": "circle", "messages": [{**message(0, "x"), "parent": "0"}]},
        {"title": "late", "changed": 1e300, "messages": [{**message(0, "x"), "created": 1e300}]},
        {"id": "t", "title": "t", "messages": [{**message(0, ELEMENTS[0]), "role": "tool"}]},
    ]
    said = page.locator("#notice-text")
    for at, conversation in enumerate(conversations):
        path = tmp_path / f"{at}.json"
        path.write_text(json.dumps({"format": format_, "conversations": [conversation]}))
        page.evaluate("document.getElementById('notice-text').textContent = ''")
        page.set_input_files("#import-file", [path])
        said.get_by_text(re.compile("^(Imported|.*cannot be read)")).wait_for()
        nothing_ran(page)
        assert at or page.locator(".message").count() == N_SHOWN
    (tmp_path / "a.md").write_text("# " + ELEMENTS[1] + "\n\n## You\n\n" + "\n\n".join(HOSTILE[:20]))
    page.set_input_files("#import-file", [tmp_path / "a.md"])
    said.get_by_text(re.compile("^Imported")).wait_for()
    page.reload()
    page.locator(".conversation").first.wait_for()
    nothing_ran(page)
