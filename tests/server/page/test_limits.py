"""Limits of the server, which the page keeps before it sends, and other things that people meet first."""

from typing import Any

from tests.server.api.conftest import Start
from tests.server.api.fakes import FakeVocab
from tests.server.page.driving import answered, ask, bodies

KEEP = """async ([sizes, limits]) => {
  const { keepWithin } = await import("/page/pictures.js");
  const drawn = async (side) => {
    const canvas = new OffscreenCanvas(side, side);
    const context = canvas.getContext("2d");
    const image = context.createImageData(side, side);
    let state = 1;
    image.data.forEach((_, at) => {
      state = (state * 16807) % 2147483647;
      image.data[at] = at % 4 === 3 ? 255 : state & 255;
    });
    context.putImageData(image, 0, 0);
    const bytes = new Uint8Array(await (await canvas.convertToBlob({ type: "image/png" })).arrayBuffer());
    let text = "";
    for (const byte of bytes) text += String.fromCharCode(byte);
    return `data:image/png;base64,${btoa(text)}`;
  };
  const messages = [];
  for (const side of sizes) {
    const picture = { type: "image_url", image_url: { url: await drawn(side) } };
    messages.push({ role: "user", content: [picture, { type: "text", text: "é?" }] });
  }
  const before = messages.map(({ content: [{ image_url }] }) => image_url.url.length);
  const body = { messages };
  await keepWithin(body, limits);
  return { before, body };
}"""


def pictures(body: dict[str, Any]) -> list[str]:
    """Of each message the picture's type, or `text` where it was left out."""
    firsts = [message["content"][0] for message in body["messages"]]
    return [
        part["image_url"]["url"].partition(";")[0][11:] if part["type"] == "image_url" else "text"
        for part in firsts
    ]


def test_pictures_are_sent_smaller_the_oldest_first(start: Start, page: Any) -> None:
    page.goto(start("x").url)
    limits = {"body_bytes": 2**20, "images": 16}
    kept = page.evaluate(KEEP, [[400, 400, 60], limits])
    assert sum(kept["before"]) > limits["body_bytes"]
    sent = [m["content"][0]["image_url"]["url"] for m in kept["body"]["messages"]]
    assert sum(map(len, sent)) < limits["body_bytes"]
    assert len(sent[0]) < kept["before"][0]
    assert len(sent[2]) == kept["before"][2], "the newest is the last that changes"
    page.get_by_text("The server reads 1 MiB at a time: older pictures were sent smaller.").wait_for()


def test_pictures_that_are_too_many_or_too_large_are_left_out_with_a_note(start: Start, page: Any) -> None:
    page.goto(start("x").url)
    kept = page.evaluate(KEEP, [[20, 20, 20], {"body_bytes": 2**20, "images": 2}])
    assert pictures(kept["body"]) == ["text", "png", "png"]
    assert "left out" in kept["body"]["messages"][0]["content"][0]["text"]
    page.get_by_text("2 pictures and 1 MiB at a time: 1 older ones were left out.").wait_for()
    kept = page.evaluate(KEEP, [[300, 300, 20], {"body_bytes": 2**16, "images": 16}])
    assert pictures(kept["body"])[2] == "png"
    assert "text" in pictures(kept["body"])[:2]


def test_a_request_within_the_limits_is_sent_as_it_is(start: Start, page: Any) -> None:
    page.goto(start("x").url)
    kept = page.evaluate(KEEP, [[20] * 3, {"body_bytes": 2**23, "images": 16}])
    assert pictures(kept["body"]) == ["png"] * 3
    assert not page.locator("#notice").is_visible()


def test_a_full_context_offers_a_new_conversation(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\n" + "on and on " * 400, context_size=256).url)
    answer = ask(page, "Go on.")
    answer.locator(".figures").get_by_text("the context is full").wait_for()
    assert not answer.get_by_label("Continue").count()
    ask(page, "And then?").locator(".problem").get_by_text("does not fit into 256 tokens").wait_for()
    page.locator(".message.assistant").last.get_by_label("New conversation").click()
    page.locator("#empty").wait_for()


def test_the_header_follows_a_server_that_was_started_anew(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nYes.").url)
    page.locator("#model").get_by_text("fake").wait_for()

    def renamed(route: Any) -> None:
        response = route.fetch()
        card = response.json()
        card["data"][0] |= {"id": "another", "max_model_len": 512}
        route.fulfill(response=response, json=card)

    page.route("**/v1/models", renamed)
    answered(page, "Hi")
    assert page.locator("#model").inner_text() == "fake", "it answered under its name"
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "And now?").locator(".problem").get_by_text("cannot be reached").wait_for()
    page.locator("#model").get_by_text("another").wait_for()
    page.locator("#context").get_by_text("of 512 tokens").wait_for()


def test_enter_is_a_new_line_on_a_touch_screen(start: Start, browser: Any) -> None:
    context = browser.new_context(has_touch=True, is_mobile=True, viewport={"width": 390, "height": 780})
    page = context.new_page()
    page.goto(start("</think>\n\nYes.").url)
    sent = bodies(page)
    page.locator("#input").tap()
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    page.keyboard.type("two")
    assert page.input_value("#input") == "one\ntwo"
    assert not sent
    page.locator("#send").tap()
    page.locator(".figures").wait_for()
    assert sent[0]["messages"][-1]["content"] == "one\ntwo"
    context.close()


def test_text_runs_in_its_own_direction(start: Start, page: Any) -> None:
    page.goto(start(lambda _: FakeVocab().tokenize("</think>\n\nمرحبا بالعالم\n\nHello", special=True)).url)
    answer = answered(page, "שלום עולם")
    directed = "all => all.map((one) => getComputedStyle(one).direction)"
    assert page.locator(".message.user .text").evaluate_all(directed) == ["rtl"]
    assert answer.locator(".markdown > div").evaluate_all(directed)[::2] == ["rtl", "ltr"]
    assert page.locator(".conversation.current > button").first.evaluate_all(directed) == ["rtl"]


def test_it_is_told_where_scripts_cannot_load(start: Start, page: Any) -> None:
    url = start("x").url
    page.goto(url)
    page.locator("#unloaded").wait_for(state="detached")
    page.route("**/page/exchange.js", lambda route: route.abort())
    page.goto(url)
    page.locator("#unloaded").get_by_text("cannot load its scripts").wait_for()


def test_a_button_leads_to_the_end(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\n" + "A line.\n\n" * 80).url)
    answered(page, "Hi")
    assert not page.locator("#end").is_visible()
    page.locator("#scroll").evaluate("one => { one.scrollTop = 0; }")
    page.locator("#end").click()
    page.locator("#end").wait_for(state="hidden")
