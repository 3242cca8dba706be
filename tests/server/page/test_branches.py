"""No message is lost: versions, interrupted answers, other tabs, deletions, full storage."""

import itertools
from typing import Any

import pytest

from tests.server.api.conftest import Start
from tests.server.page.driving import answered, ask, bodies
from tests.waiting import wait_until

SLOW = "</think>\n\n" + "on and on " * 300
OLD = """() => new Promise((resolve, reject) => {
  const request = indexedDB.open("qwen-serve", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
  request.onerror = reject;
  request.onsuccess = () => {
    const transaction = request.result.transaction("conversations", "readwrite");
    transaction.objectStore("conversations").put({ id: "1-2", title: "Old?", changed: 5, messages: [
      { role: "user", content: "Old?" }, { role: "assistant", content: "Old.", reasoning: "", figures: "3" },
      { role: "user", content: "And?" }, { role: "assistant", content: "Then.", reasoning: "Hm", thought: 5 },
    ] });
    transaction.oncomplete = () => { request.result.close(); resolve(); };
  };
})"""


KEPT = """() => new Promise((resolve, reject) => {
  const request = indexedDB.open("qwen-serve");
  request.onerror = reject;
  request.onsuccess = () => {
    const messages = request.result.transaction("messages").objectStore("messages").getAll();
    messages.onsuccess = () => { request.result.close(); resolve(messages.result); };
  };
})"""


def kept_messages(page: Any) -> list[dict[str, Any]]:
    """What the browser has of all conversations; other work of the page goes on before the next look."""
    page.wait_for_timeout(20)
    messages: list[dict[str, Any]] = page.evaluate(KEPT)
    return messages


def texts(page: Any) -> list[str]:
    return page.locator(".message .text, .message .markdown").all_inner_texts()


def send(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.keyboard.press("Enter")


def test_an_edited_question_is_another_version_of_it(start: Start, page: Any) -> None:
    server = start("</think>\n\nYes.")
    page.goto(server.url)
    answered(page, "First?")
    answered(page, "Second?")
    whole = texts(page)
    page.fill("#input", "a draft")
    page.locator(".message.user").first.hover()
    page.get_by_label("Edit and ask again").first.click()
    assert page.input_value("#input") == "First?"
    assert texts(page) == whole, "nothing goes before something new is sent"
    page.keyboard.press("Escape")
    assert page.input_value("#input") == "a draft"
    page.fill("#input", "")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#input") == "Second?"
    page.reload()
    page.locator("#cancel-edit").wait_for()
    assert page.input_value("#input") == "Second?"
    assert texts(page) == whole
    page.locator("#cancel-edit").click()
    page.get_by_label("Edit and ask again").first.click()
    send(page, "Other?")
    page.get_by_text("2/2").wait_for()
    page.locator(".figures").wait_for()
    assert texts(page) == ["Other?", "Yes."]
    assert "First?" not in server.engine.submissions[-1].text
    page.get_by_label("Version before").click()
    assert texts(page) == whole
    page.reload()
    page.get_by_text("1/2").wait_for()
    assert texts(page) == whole
    page.get_by_label("Next version").click()
    assert texts(page) == ["Other?", "Yes."]


@pytest.mark.slow
def test_another_answer_is_another_version_of_it(start: Start, page: Any) -> None:
    numbers = itertools.count(1)
    page.goto(start(lambda _: f"</think>\n\nAnswer {next(numbers)}.").url)
    answered(page, "Well?")
    page.get_by_label("Answer again").click()
    page.get_by_text("2/2").wait_for()
    page.get_by_text("Answer 2.").wait_for()
    page.locator(".figures").wait_for()
    page.get_by_label("Version before").press("Enter")
    assert texts(page) == ["Well?", "Answer 1."]
    assert page.evaluate("document.activeElement.ariaLabel") == "Next version", "the keyboard stays there"


def test_a_reload_keeps_what_has_come_and_it_goes_on(start: Start, page: Any) -> None:
    server = start(lambda p: " the end." if "on and on" in p.partition("</think>")[2] else SLOW, delay=0.01)
    page.goto(server.url)
    ask(page, "Count.").get_by_text("on and on").wait_for()
    wait_until(lambda: any("on and on" in message["content"] for message in kept_messages(page)))
    page.reload()
    page.get_by_text("interrupted").wait_for()
    kept = texts(page)[1]
    assert kept.startswith("on and on")
    sent = bodies(page)
    page.get_by_label("Continue").click()
    page.get_by_text("the end.").wait_for()
    page.locator(".figures").get_by_text("tokens").wait_for()
    assert texts(page)[1].startswith(kept)
    assert sent[0]["continue_final_message"] is True
    assert sent[0]["messages"][-1]["content"].startswith(kept.strip())
    assert page.get_by_label("Continue").count() == 0
    page.get_by_label("Answer again").click()
    page.get_by_text("2/2").wait_for()


@pytest.mark.slow
def test_an_answer_goes_on_in_its_own_conversation(start: Start, page: Any) -> None:
    server = start(lambda p: "</think>\n\nShort." if "Other" in p else SLOW[:1000], delay=0.02)
    page.goto(server.url)
    ask(page, "Count.").get_by_text("on and on").wait_for()
    page.keyboard.press("Alt+N")
    page.locator(".conversation .waiting").wait_for()
    assert answered(page, "Other").locator(".markdown").inner_text() == "Short."
    server.engine.delay = 0
    wait_until(lambda: page.wait_for_timeout(20) or server.engine.submissions[0].finished)
    assert texts(page) == ["Other", "Short."]
    page.locator(".conversation").get_by_text("Count.").click()
    page.locator(".figures").get_by_text("tokens").wait_for()
    assert texts(page)[1].strip() == SLOW[:1000].partition("</think>")[2].strip()


@pytest.mark.slow
def test_conversations_of_the_first_format_are_read(start: Start, page: Any) -> None:
    server = start("</think>\n\nYes.")
    page.goto(server.url + "/ping")
    page.evaluate(OLD)
    page.goto(server.url)
    page.locator(".conversation").get_by_text("Old?").click()
    page.locator(".message").nth(3).wait_for()
    assert texts(page) == ["Old?", "Old.", "And?", "Then."]
    answered(page, "New?")
    page.reload()
    page.locator(".message").nth(5).wait_for()
    assert texts(page) == ["Old?", "Old.", "And?", "Then.", "New?", "Yes."]


@pytest.mark.slow
def test_two_tabs_keep_what_the_other_wrote(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nYes.").url)
    answered(page, "One?")
    other = page.context.new_page()
    other.goto(page.url)
    other.locator(".conversation button").first.click()
    other.locator(".message").nth(1).wait_for()
    page.keyboard.press("ArrowUp")
    send(page, "Two?")
    page.get_by_text("2/2").wait_for()
    answered(other, "Three?")
    for tab in (page, other):
        tab.reload()
        tab.get_by_label("Version before").or_(tab.get_by_label("Next version")).first.wait_for()
        both = set(texts(tab))
        tab.locator(".foot.kept button:not(:disabled)").first.click()
        assert both | set(texts(tab)) == {"One?", "Yes.", "Two?", "Three?"}


@pytest.mark.slow
def test_a_deletion_can_be_undone(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nYes.").url)
    answered(page, "One?")
    page.locator(".conversation").hover()
    page.locator(".conversation").get_by_label("Delete").click()
    page.locator("#empty").wait_for()
    assert page.locator(".conversation").count() == 0
    page.get_by_text("Undo").click()
    page.locator(".message").nth(1).wait_for()
    page.reload()
    page.locator(".message").nth(1).wait_for()
    assert texts(page) == ["One?", "Yes."]
    page.locator(".conversation").hover()
    with page.expect_download() as download:
        page.locator(".conversation").get_by_label("Save as a file").click()
        page.locator("#save-markdown").click()
    assert "## You\n\nOne?\n\n## Model\n\nYes." in download.value.path().read_text()
    page.locator(".conversation").get_by_label("Delete").click()
    page.locator("#empty").wait_for()
    wait_until(lambda: not kept_messages(page))
    page.reload()
    page.locator("#empty").wait_for()
    assert page.locator(".conversation").count() == 0


FULL = """() => {
  window.put = IDBObjectStore.prototype.put;
  IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
}"""


@pytest.mark.slow
def test_a_full_storage_is_told_and_saved_later(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nYes.").url)
    answered(page, "One?")
    page.evaluate(FULL)
    answered(page, "Two?")
    page.locator("#notice-text").get_by_text("no room left").wait_for()
    assert texts(page) == ["One?", "Yes.", "Two?", "Yes."]
    page.evaluate("() => { IDBObjectStore.prototype.put = window.put; }")
    answered(page, "Three?")
    page.locator("#notice").wait_for(state="hidden")
    page.reload()
    page.locator(".message").nth(5).wait_for()
    assert texts(page) == ["One?", "Yes.", "Two?", "Yes.", "Three?", "Yes."]
