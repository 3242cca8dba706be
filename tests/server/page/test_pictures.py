"""Pictures on the page: attached, pasted, dropped, sent, shown again, and reduced if they are too large."""

import base64
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qwen_serve.server.api.page import FOLDER
from qwen_serve.server.chat.pictures import MAX_IMAGES
from tests.server.api.conftest import Start
from tests.server.page.driving import bodies
from tests.server.seeing import encoded, needs_vision, noise
from tests.server.serving import Served
from tests.waiting import wait_until

GIVE = """([kind, files]) => {
  const data = new DataTransfer();
  for (const [name, type, text] of files) {
    data.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name, { type }));
  }
  const how = { bubbles: true, cancelable: true };
  const event = kind === "paste" ? new ClipboardEvent(kind, { ...how, clipboardData: data })
    : new DragEvent(kind, { ...how, dataTransfer: data });
  document.querySelector("#input").dispatchEvent(event);
}"""


def give(page: Any, kind: str, *files: tuple[str, str, bytes]) -> None:
    """Paste or drop files, each given as name, type and bytes."""
    page.evaluate(GIVE, [kind, [[n, t, base64.b64encode(data).decode()] for n, t, data in files]])


def opened(page: Any, seeing: Served, *, think: bool) -> list[dict[str, Any]]:
    """The page, whose answers have four tokens; the bodies of its requests, which come later."""
    page.goto(seeing.url)
    stored = json.dumps(json.dumps({"max_tokens": "4", "think": think}))
    page.evaluate(f"localStorage.setItem('qwen-serve', {stored})")
    page.reload()
    return bodies(page)


def png(seed: int) -> bytes:
    return base64.b64decode(encoded(noise(seed)))


def sent_pictures(body: dict[str, Any], message: int = -1) -> list[bytes]:
    parts = body["messages"][message]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


@needs_vision
def test_pictures_are_attached_sent_and_kept(seeing: Served, page: Any, tmp_path: Path) -> None:
    sent = opened(page, seeing, think=False)
    page.locator("#attach[title*=pictures]").wait_for()
    for seed in (1, 2):
        (tmp_path / f"{seed}.png").write_bytes(png(seed))
    page.set_input_files("#file", [tmp_path / "1.png", tmp_path / "2.png"])
    give(page, "paste", ("3.png", "image/png", png(3)))
    give(page, "dragover", ("4.png", "image/png", png(4)))
    page.locator("body.dropping").wait_for()
    give(page, "drop", ("4.png", "image/png", png(4)))
    page.locator("#pictures img").nth(3).wait_for()
    assert not page.locator("body.dropping").count()
    page.get_by_label("Remove picture 2").click()
    page.fill("#input", "What are they?")
    page.keyboard.press("Enter")
    page.locator(".figures").wait_for()
    assert page.locator(".problem:visible").count() == 0
    assert sent_pictures(sent[0]) == [png(1), png(3), png(4)], "as they are"
    assert sent[0]["messages"][-1]["content"][-1] == {"type": "text", "text": "What are they?"}
    assert not page.locator("#pictures").is_visible()
    page.reload()
    page.locator(".message.user img").nth(2).wait_for()
    page.fill("#input", "And now?")
    page.keyboard.press("Enter")
    page.locator(".figures").nth(1).wait_for()
    assert sent_pictures(sent[1], 0) == [png(1), png(3), png(4)], "they are said again, in their place"
    assert int(re.findall(r"(\d+) of", page.locator(".figures").nth(1).inner_text())[0]) > 3 * 48
    picture = page.locator(".message.user button.picture").first
    picture.click()
    assert picture.get_attribute("aria-expanded") == "true"


@needs_vision
def test_they_keep_their_order_and_are_waited_for(seeing: Served, page: Any) -> None:
    sent = opened(page, seeing, think=False)
    page.locator("#attach[title*=pictures]").wait_for()
    page.evaluate(
        """() => {
          const read = window.createImageBitmap;
          const first = new Promise((resolve) => { window.release = resolve; });
          window.createImageBitmap = async (file) => {
            if (file.name === "1.png") await first;
            return read(file);
          };
        }"""
    )
    give(page, "paste", ("1.png", "image/png", png(1)))
    give(page, "drop", ("2.png", "image/png", png(2)))
    page.fill("#input", "What are they?")
    page.keyboard.press("Enter")
    assert page.locator("#send").is_disabled()
    assert page.locator(".message").count() == 0
    page.evaluate("release()")
    page.locator("#send:enabled").click()
    page.locator(".figures").wait_for()
    assert sent_pictures(sent[0]) == [png(1), png(2)]


@needs_vision
def test_a_picture_alone_is_a_message_and_an_edit_takes_it_along(seeing: Served, page: Any) -> None:
    sent = opened(page, seeing, think=False)
    page.locator("#attach[title*=pictures]").wait_for()
    give(page, "paste", ("1.png", "image/png", png(1)))
    page.locator("#pictures img").wait_for()
    page.locator("#send:enabled").click()
    page.locator(".figures").wait_for()
    assert sent_pictures(sent[0]) == [png(1)]
    assert page.locator(".conversation.current").inner_text() == "Picture"
    give(page, "paste", ("9.png", "image/png", png(9)))  # for the next message, which waits
    page.locator("#pictures img").wait_for()
    page.locator(".message.user").hover()
    page.get_by_label("Edit and ask again").click()
    assert page.locator("#pictures img").count() == 1
    page.fill("#input", "What is it?")
    page.keyboard.press("Enter")
    page.get_by_text("2/2").wait_for()
    wait_until(lambda: page.wait_for_timeout(20) or len(sent) == 2)
    assert sent_pictures(sent[1]) == [png(1)]
    assert page.locator("#pictures img").count() == 1, "what waited comes back"


@needs_vision
def test_what_is_too_large_is_made_smaller(seeing: Served, page: Any) -> None:
    page.goto(seeing.url)
    page.locator("#attach[title*=pictures]").wait_for()
    buffer = BytesIO()
    Image.fromarray(np.zeros((3000, 2000, 3), np.uint8)).save(buffer, "PNG")
    other = BytesIO()
    noise(1).save(other, "BMP")
    give(page, "paste", ("a.png", "image/png", buffer.getvalue()), ("b.bmp", "image/bmp", other.getvalue()))
    page.locator("#pictures img").nth(1).wait_for()
    urls = page.locator("#pictures img").evaluate_all("all => all.map(({ src }) => src)")
    large, converted = (Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls)
    assert large.width * large.height <= 2**22
    assert abs(large.height / large.width - 1.5) < 0.01
    assert (converted.format, converted.size) == ("JPEG", (128, 96))
    give(page, "drop", ("c.png", "image/png", b"not a picture"))
    page.get_by_text("“c.png” is no picture that this browser can read.").wait_for()


@needs_vision
def test_a_picture_to_try(seeing: Served, page: Any) -> None:
    """Nothing is sent before the user sends it."""
    sent = opened(page, seeing, think=True)
    page.locator("#example").click()
    page.locator("#pictures img").wait_for()
    assert page.input_value("#input") == "How many circles are there?"
    assert page.locator("#think").get_attribute("aria-pressed") == "false"
    assert not sent
    page.locator("#send:enabled").click()
    page.locator(".figures").wait_for()
    (picture,) = sent_pictures(sent[0])
    assert Image.open(BytesIO(picture)).size == (112, 80)
    assert not page.locator("#example").is_visible()


def test_it_attaches_as_many_as_are_read() -> None:
    source = (FOLDER / "pictures.js").read_text(encoding="utf-8")
    assert f"const MOST = {MAX_IMAGES};" in source


def test_where_nothing_sees(start: Start, page: Any) -> None:
    page.goto(start("x").url)
    page.locator("#model").get_by_text("fake").wait_for()
    give(page, "paste", ("1.png", "image/png", png(1)))
    page.get_by_text("This model sees no pictures.").wait_for()
    assert not page.locator("#example").is_visible()
    assert not page.locator("#pictures").is_visible()
