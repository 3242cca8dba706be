"""Text files, titles, search, saved conversations, all samplers, and axe's accessibility checks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.api.conftest import Start
from tests.server.page.driving import answered, ask, bodies
from tests.waiting import wait_until

NOTES = {"name": "notes.md", "mimeType": "text/markdown", "buffer": b"one\n```\ntwo\n```\n"}
ANSWER = """Hm.</think>

# A title

| a | b |
|---|---|
| 1 | 2 |

```python
print("a line that is long enough to have to scroll on any screen that is as narrow as that of a phone")
```

## You

$x^2$
"""
SIZES = {"desktop": (1280, 800), "tablet": (820, 1100), "phone": (390, 780)}


def test_text_files_are_sent_kept_and_taken_along_by_an_edit(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nYes.").url)
    sent = bodies(page)
    page.locator("#model").get_by_text("fake").wait_for()
    wrong = {"name": "a.bin", "mimeType": "application/octet-stream", "buffer": b"\xff\0"}
    page.set_input_files("#file", [wrong])
    page.get_by_text("“a.bin” is neither a picture nor text in UTF-8, UTF-16").wait_for()
    page.set_input_files("#file", [NOTES, {**NOTES, "name": "other.py"}])
    page.get_by_label("Remove other.py").click()
    answered(page, "What is this?")
    content = "notes.md\n\n````\none\n```\ntwo\n```\n````\n\nWhat is this?"
    assert sent[0]["messages"][-1] == {"role": "user", "content": content}
    page.reload()
    page.locator(".message.user summary").get_by_text("notes.md").click()
    assert page.locator(".message.user pre").inner_text() == "one\n```\ntwo\n```\n"
    page.locator(".message.user").hover()
    page.get_by_label("Edit and ask again").click()
    page.fill("#input", "And now?")
    page.keyboard.press("Enter")
    page.get_by_text("2/2").wait_for()
    wait_until(lambda: page.wait_for_timeout(20) or len(sent) == 2)
    assert sent[1]["messages"][-1]["content"] == content.replace("What is this?", "And now?")


def test_conversations_are_renamed_and_searched_by_keys(start: Start, page: Any) -> None:
    page.goto(start(lambda prompt: "</think>\n\n" + ("A llama." if "animal" in prompt else "Blue.")).url)
    answered(page, "Which animal?")
    page.keyboard.press("Alt+N")
    answered(page, "Which colour?")
    page.locator(".conversation.current").hover()
    page.locator(".conversation.current").get_by_label("Rename").click()
    page.keyboard.type("Colours, all of them")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Colours, all of them").wait_for()
    page.wait_for_function("document.title === 'Colours, all of them · qwen-serve'")
    page.keyboard.press("Alt+K")
    for wanted, found in (("LLAMA", "Which animal?"), ("all of", "Colours, all of them")):
        page.keyboard.press("Control+A")
        page.keyboard.type(wanted)
        page.locator("#found").get_by_text("1 found").wait_for()
        wait_until(
            lambda: (
                page.locator(".conversation").all_inner_texts() == [found]  # noqa: B023
                or page.wait_for_timeout(20)
            )
        )
    page.keyboard.press("Enter")
    page.locator(".message.user").get_by_text("Which colour?").wait_for()
    page.locator("#search").focus()
    page.keyboard.press("Escape")
    page.locator(".conversation").nth(1).wait_for()
    page.reload()
    page.get_by_role("button", name="Colours, all of them").wait_for()


@pytest.mark.slow
def test_files_of_conversations_are_read_again(start: Start, page: Any, tmp_path: Path) -> None:
    page.goto(start(ANSWER).url)
    page.set_input_files("#file", [NOTES])
    page.locator("#pictures .file").wait_for()
    answered(page, "## You\n\n\\## Model")
    page.get_by_label("Answer again").click()
    page.get_by_text("2/2").wait_for()
    page.locator(".figures").wait_for()
    with page.expect_download() as download:
        page.locator("#export").click()
    download.value.save_as(tmp_path / "all.json")
    page.locator(".conversation").hover()
    page.locator(".conversation").get_by_label("Save as a file").click()
    with page.expect_download() as download:
        page.locator("#save-markdown").click()
    download.value.save_as(tmp_path / "one.md")
    [kept] = json.loads((tmp_path / "all.json").read_text())["conversations"]
    shown = page.locator("#log").inner_text()

    page.set_input_files("#import-file", [tmp_path / "all.json"])
    page.locator(".conversation").nth(1).wait_for()
    page.get_by_text("Imported").wait_for()
    assert page.locator("#log").inner_text() == shown
    with page.expect_download() as download:
        page.locator("#export").click()
    again = json.loads(Path(download.value.path()).read_text())["conversations"]
    assert len({one["id"] for one in again}) == 2

    def said(conversation: dict[str, Any]) -> list[Any]:
        return [
            {k: v for k, v in message.items() if k not in ("id", "parent", "conversation") and v is not False}
            for message in sorted(conversation["messages"], key=lambda message: message["created"])
        ]

    assert [said(one) for one in again] == [said(kept)] * 2

    page.set_input_files("#import-file", [tmp_path / "one.md"])
    page.locator(".conversation").nth(2).wait_for()
    answer = page.locator(".message.assistant .markdown")
    assert answer.locator("h2").inner_text() == "You"
    assert page.locator(".message").count() == 2
    assert "## You\n\n\\## Model" in page.locator(".message.user").inner_text()
    (tmp_path / "bad.json").write_text('{"format": "another"}')
    page.set_input_files("#import-file", [tmp_path / "bad.json"])
    page.get_by_text("“bad.json” cannot be read: its format is not").wait_for()


def test_every_sampler_reaches_a_request_that_is_accepted(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nYes.").url)
    sent = bodies(page)
    page.keyboard.press("Alt+S")
    page.locator("#more summary").click()
    names = page.locator("dialog input[type=number]").evaluate_all("all => all.map(({ name }) => name)")
    for name in names:
        page.fill(f"[name={name}]", "1")
    page.keyboard.press("Escape")
    answered(page, "Hi")
    assert {name: sent[0][name] for name in names} == dict.fromkeys(names, 1)
    wanted = "dry_multiplier xtc_probability typical_p top_n_sigma mirostat dynatemp_range repetition_penalty"
    assert {*wanted.split(), "presence_penalty", "frequency_penalty", "min_p", "seed"} <= set(names)
    page.keyboard.press("Alt+S")
    page.locator("#reset").click()
    page.keyboard.press("Escape")
    answered(page, "Hi")
    assert not set(names) & set(sent[1])


def test_the_context_in_use_and_the_model_are_told(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nYes.").url)
    answered(page, "Hi")
    used, _, rest = page.locator("#context").inner_text().partition(" ")
    assert int(used) > 10
    assert rest == "of 4,096 tokens"
    page.keyboard.press("Alt+S")
    facts = page.locator("#facts").inner_text()
    for told in ("qwen35 fake", "4,096 of 262,144 tokens", "qwen-serve"):
        assert told in facts


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_axe_finds_nothing_and_nothing_overflows(start: Start, page: Any, size: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe-playwright-python is not installed")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.goto(start(ANSWER).url)
    page.locator("#model").get_by_text("fake").wait_for()

    def check(what: str) -> None:
        page.evaluate(script)
        found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
        told = [(v["id"], [node["target"] for node in v["nodes"]]) for v in found]
        assert not told, (what, told)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, what

    check("empty")
    page.set_input_files("#file", [NOTES])
    page.locator("#pictures .file").wait_for()
    check("with a file")
    answered(page, "A question that is so long that its title does not fit into the list of conversations")
    page.locator(".file summary").click()
    page.locator(".thinking summary").click()
    check("answered")
    ask(page, "x" * 5000).locator(".problem").wait_for()
    if size == "phone":
        page.locator("#menu").click()
        side = page.locator("#side")
        wait_until(lambda: page.wait_for_timeout(20) or side.bounding_box()["x"] == 0)
    page.fill("#search", "question")
    page.locator("#found").get_by_text("1 found").wait_for()
    page.locator(".conversation").hover()
    check("searched")
    page.locator(".conversation").get_by_label("Save as a file").click()
    assert page.locator("#saving-what").inner_text().endswith("the list of convers…")
    check("saving")
    page.keyboard.press("Escape")
    page.locator(".conversation").get_by_label("Rename").click()
    check("renaming")
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+S")
    page.locator("#more summary").click()
    tops = [
        page.locator(f"[name={name}]").bounding_box()["y"] for name in ("reasoning_effort", "thinking_budget")
    ]
    assert abs(tops[0] - tops[1]) < 1
    check("settings")
