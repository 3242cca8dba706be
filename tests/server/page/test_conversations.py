"""A conversation's own settings, its address, its messages one by one; conversations of other programs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.api.conftest import Start
from tests.server.page.driving import answered, bodies


def texts(page: Any) -> list[str]:
    found: list[str] = page.locator(".message .text, .message .markdown").all_inner_texts()
    return found


def set_own(page: Any, **values: str) -> None:
    page.keyboard.press("Alt+S")
    page.get_by_label("this one").check()
    for name, value in values.items():
        page.fill(f"[name={name}]", value)
    page.keyboard.press("Escape")


def test_an_answer_is_edited_and_a_message_taken_out(start: Start, page: Any) -> None:
    server = start("</think>\n\nYes.")
    page.goto(server.url)
    answered(page, "First?")
    answered(page, "Second?")
    page.get_by_label("Edit what was said").first.click()
    page.get_by_text("What you save becomes another version").wait_for()
    page.fill("#input", "No.")
    page.keyboard.press("Enter")
    page.get_by_text("2/2").wait_for()
    assert texts(page) == ["First?", "No."]
    answered(page, "Why?")
    assert "First?" in server.engine.submissions[-1].text
    assert "No.<|im_end|>" in server.engine.submissions[-1].text
    page.get_by_label("Take out").nth(1).click()
    page.get_by_text("Taken out").wait_for()
    assert texts(page) == ["First?", "Why?", "Yes."]
    page.locator("#notice-action").click()
    page.get_by_text("2/2").wait_for()
    assert texts(page) == ["First?", "No.", "Why?", "Yes."]
    page.get_by_label("Take out").last.click()
    page.get_by_text("Taken out").wait_for()
    page.reload()
    page.get_by_text("2/2").wait_for()
    assert texts(page) == ["First?", "No.", "Why?"]


def test_a_conversation_has_settings_of_its_own_and_shows_them(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nYes.").url)
    sent = bodies(page)
    page.locator("#model").get_by_text("fake").wait_for()
    set_own(page, system="Be brief.", temperature="0.5", thinking_budget="64")
    answered(page, "One?")
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (sent[0]["temperature"], sent[0]["thinking_budget"]) == (0.5, 64)
    assert page.locator("#own").inner_text().split("\n") == [
        "Be brief.",
        "thinking budget 64, temperature 0.5",
    ]
    page.keyboard.press("Alt+N")
    assert not page.locator("#own").is_visible()
    answered(page, "Two?")
    assert [message["role"] for message in sent[1]["messages"]] == ["user"]
    assert not {"temperature", "thinking_budget"} & set(sent[1])
    page.get_by_role("button", name="One?").click()
    page.locator("#own").get_by_text("Be brief.").wait_for()
    page.reload()
    page.locator("#own").get_by_text("Be brief.").wait_for()
    page.locator("#own").click()
    assert page.get_by_label("this one").is_checked()
    assert page.input_value("[name=temperature]") == "0.5"
    page.select_option("[name=reasoning_effort]", "low")
    page.keyboard.press("Escape")
    answered(page, "Three?")
    assert sent[2]["reasoning_effort"] == "low"


def test_empty_fields_show_the_models_numbers(start: Start, page: Any) -> None:
    page.goto(start("x", sampling_defaults="card").url)
    page.locator("#model").get_by_text("fake").wait_for()
    defaults = page.evaluate("async () => (await (await fetch('/props')).json()).default_generation_settings")

    def shown(name: str) -> float:
        return float(page.get_attribute(f"[name={name}]", "placeholder"))

    for mode in ("thinking_params", "params"):
        page.keyboard.press("Alt+S")
        for name in ("temperature", "top_p", "top_k", "presence_penalty"):
            assert shown(name) == pytest.approx(defaults[mode][name], rel=1e-3), (mode, name)
        assert shown("repetition_penalty") == defaults[mode]["repeat_penalty"]
        page.keyboard.press("Escape")
        page.keyboard.press("Alt+T")
    assert defaults["params"] != defaults["thinking_params"]


def test_each_conversation_has_an_address(start: Start, page: Any) -> None:
    url = start("</think>\n\nYes.").url
    page.goto(url)
    answered(page, "One?")
    first = page.url
    assert "#" in first
    page.keyboard.press("Alt+N")
    page.locator("#empty").wait_for()
    assert "#" not in page.url
    answered(page, "Two?")
    second = page.url
    page.goto(first)
    page.locator(".message .text").get_by_text("One?").wait_for()
    page.evaluate("history.back()")
    page.locator(".message .text").get_by_text("Two?").wait_for()
    assert page.url == second


def test_a_question_in_the_address_is_asked_once(start: Start, page: Any) -> None:
    server = start("</think>\n\nYes.")
    page.goto(f"{server.url.rstrip('/')}/?q=What%20is%20%22it%22%3F")
    page.locator(".figures").wait_for()
    assert texts(page) == ['What is "it"?', "Yes."]
    assert "?" not in page.url
    page.reload()
    page.locator(".figures").wait_for()
    assert len(server.engine.submissions) == 1


def test_it_can_be_installed(start: Start, page: Any) -> None:
    page.goto(start("x").url)
    session = page.context.new_cdp_session(page)
    manifest = session.send("Page.getAppManifest")
    assert not manifest["errors"]
    icons = json.loads(manifest["data"])["icons"]
    assert {icon["type"] for icon in icons} == {"image/svg+xml", "image/png"}
    widths = """urls => Promise.all(urls.map(async (url) => {
      const image = Object.assign(new Image(), { src: `/page/${url}` });
      await image.decode();
      return image.width;
    }))"""
    assert all(page.evaluate(widths, [icon["src"] for icon in icons]))
    errors = session.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert [error["errorId"] for error in errors if error["errorId"] != "in-incognito"] == []


def of_llama_server(id: str, parent: str | None, role: str, content: str, **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "convId": "c",
        "type": "text",
        "role": role,
        "content": content,
        "parent": parent,
        **more,
    }


def of_chatgpt(parent: str | None, role: str, text: str) -> dict[str, Any]:
    content = {"content_type": "text", "parts": [text]}
    return {"parent": parent, "message": {"author": {"role": role}, "recipient": "all", "content": content}}


LLAMA = {
    "conv": {"id": "c", "name": "From llama-server", "lastModified": 5, "currNode": "a2"},
    "messages": [
        of_llama_server("r", None, "system", "") | {"type": "root"},
        of_llama_server("s", "r", "system", "Be brief."),
        of_llama_server(
            "q",
            "s",
            "user",
            "One?",
            timestamp=2,
            extra=[{"type": "TEXT", "name": "a.txt", "content": "text"}],
        ),
        of_llama_server("a1", "q", "assistant", "No.", timestamp=3),
        of_llama_server("a2", "q", "assistant", "Yes.", timestamp=4, reasoningContent="Hm."),
    ],
}
CHATGPT = [
    {
        "title": "From ChatGPT",
        "update_time": 9.5,
        "current_node": "a",
        "mapping": {
            "root": {"message": None, "parent": None, "children": ["s"]},
            "s": of_chatgpt("root", "system", ""),
            "q": of_chatgpt("s", "user", "One?"),
            "t": of_chatgpt("q", "tool", "x"),
            "a": of_chatgpt("t", "assistant", "Yes."),
        },
    }
]
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "One?"},
        {"from": "gpt", "value": "Yes."},
    ]
}
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "One?"}]},
    {"role": "assistant", "content": "Yes."},
]


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("llama.json", json.dumps(LLAMA), "From llama-server"),
        ("conversations.json", json.dumps(CHATGPT), "From ChatGPT"),
        ("share.json", json.dumps([SHAREGPT]), "One?"),
        ("share.jsonl", f"{json.dumps(SHAREGPT)}\n{json.dumps(SHAREGPT)}\n", "One?"),
        ("messages.json", json.dumps(MESSAGES), "One?"),
    ],
)
def test_conversations_of_other_programs_are_read(
    start: Start, page: Any, tmp_path: Path, name: str, text: str, title: str
) -> None:
    (tmp_path / name).write_text(text)
    page.goto(start("</think>\n\nYes.").url)
    page.set_input_files("#import-file", tmp_path / name)
    page.get_by_text("Imported", exact=False).first.wait_for()
    assert page.locator(".conversation.current > button").first.inner_text() == title
    assert [one for one in texts(page) if one] == ["One?", "Yes."]
    if name == "llama.json":
        assert page.locator(".message.user summary").inner_text().startswith("a.txt")
        assert page.locator(".count").inner_text() == "2/2"
    if "Be brief." in text:
        assert page.locator("#own").inner_text() == "Be brief."


def test_other_files_are_refused(start: Start, page: Any, tmp_path: Path) -> None:
    page.goto(start("x").url)
    for number, text in enumerate(('{"a": 1}', "[1]", '{"conversations": 5}', '{"messages": []}', "{")):
        (tmp_path / f"{number}.json").write_text(text)
        page.set_input_files("#import-file", tmp_path / f"{number}.json")
        page.get_by_text(f"“{number}.json” cannot be read").wait_for()
    assert page.locator(".conversation").count() == 0
