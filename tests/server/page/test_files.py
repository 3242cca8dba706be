"""Files of a message: PDF, text in other encodings, SVG."""

from typing import Any

import pytest

from tests.server.api.conftest import Start
from tests.server.page.driving import answered, bodies

HELVETICA = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
SONG = (
    "<< /Type /Font /Subtype /Type0 /BaseFont /STSong-Light /Encoding /UniGB-UCS2-H /DescendantFonts [<< "
    "/Type /Font /Subtype /CIDFontType0 /BaseFont /STSong-Light /CIDSystemInfo << /Registry (Adobe) "
    "/Ordering (GB1) /Supplement 4 >> /FontDescriptor << /Type /FontDescriptor /FontName /STSong-Light "
    "/Flags 4 /FontBBox [0 0 999 999] /ItalicAngle 0 /Ascent 800 /Descent 0 /StemV 90 >> >>] >>"
)
"""A font of Chinese that is named, not embedded, with UTF-16 as its encoding."""


def pdf(*pages: str, font: str = HELVETICA) -> bytes:
    """A PDF with a page for each text, whose lines are shown in the font."""
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
    ]
    for number, text in enumerate(pages):
        codes = [
            f"({one})" if font == HELVETICA else f"<{one.encode('utf-16-be').hex()}>"
            for one in text.split("\n")
        ]
        lines = "".join(f"{line} Tj 0 -14 Td " for line in codes)
        shown = f"BT /F1 12 Tf 72 720 Td {lines}ET" if text else ""
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {4 + 2 * number} 0 R "
            f"/Resources << /Font << /F1 {font} >> >> >>",
            f"<< /Length {len(shown)} >>\nstream\n{shown}\nendstream",
        ]
    out, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{one}\nendobj\n".encode("cp1252")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    head = f"xref\n0 {size}\n0000000000 65535 f \n"
    end = f"trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF"
    return out + f"{head}{table}{end}".encode()


def give(page: Any, name: str, data: bytes, kind: str = "") -> None:
    page.set_input_files("#file", [{"name": name, "mimeType": kind, "buffer": data}])


def test_a_pdf_is_sent_as_text_and_its_reader_loads_only_then(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nYes.").url)
    sent = bodies(page)
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url.rpartition("/")[2]))
    give(page, "a.txt", b"one")
    page.get_by_label("Remove a.txt").click()
    assert not any("pdf" in name for name in loaded)
    give(page, "two.pdf", pdf("One caf\u00e9\nand more", "Two"), "application/pdf")
    page.get_by_label("Remove two.pdf").wait_for()
    assert {"pdf.js", "pdf.min.mjs", "pdf.worker.min.mjs"} <= set(loaded)
    answered(page, "What is this?")
    want = "two.pdf\n\n```\n[Page 1]\n\nOne caf\u00e9\nand more\n\n[Page 2]\n\nTwo\n```\n\nWhat is this?"
    assert sent[0]["messages"][-1]["content"] == want


def test_a_pdf_in_chinese_is_read_by_the_cmaps_that_it_names(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nYes.").url)
    sent = bodies(page)
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url.rpartition("/")[2]))
    give(page, "song.pdf", pdf("你好，世界", font=SONG), "application/pdf")
    page.get_by_label("Remove song.pdf").wait_for()
    answered(page, "What is this?")
    assert "\n你好，世界\n" in sent[0]["messages"][-1]["content"]
    assert 0 < sum(name.endswith(".bcmap") for name in loaded) < 5


@pytest.mark.parametrize(
    ("data", "why"),
    [(pdf(""), "has no text"), (b"%PDF-1.4\n" + b"x" * 600, "is damaged"), (b"no pdf \0", "is neither")],
)
def test_a_pdf_without_text_is_refused(start: Start, page: Any, data: bytes, why: str) -> None:
    page.goto(start("x").url)
    give(page, "scan.pdf", data, "application/pdf")
    page.get_by_text(f"“scan.pdf” {why}").wait_for()
    assert not page.locator("#pictures .file").count()


def test_text_in_other_encodings_and_svg_are_text(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nYes.").url)
    sent = bodies(page)
    svg = "<svg xmlns='http://www.w3.org/2000/svg'><script>document.title = 'owned'</script></svg>"
    text = "Größe “x” — 5 €"
    files = {
        "le.txt": text.encode("utf-16"),
        "be.txt": b"\xfe\xff" + text.encode("utf-16-be"),
        "bare.txt": text.encode("utf-16-le"),
        "windows.txt": text.encode("cp1252"),
        "a.svg": svg.encode(),
    }
    for name, data in files.items():
        give(page, name, data, "image/svg+xml" if name.endswith("svg") else "text/plain")
        page.get_by_label(f"Remove {name}").wait_for()
    answered(page, "Well?")
    content = sent[0]["messages"][-1]["content"]
    assert content.count(f"```\n{text}\n```") == 4
    assert f"a.svg\n\n```\n{svg}\n```" in content
    assert page.title() != "owned"
    for name, data in (("a.exe", b"MZ\x90\0\3\0\0\0"), ("odd.bin", bytes(range(256)))):
        give(page, name, data)
        page.get_by_text(
            f"“{name}” is neither a picture nor text in UTF-8, UTF-16 or Windows-1252"
        ).wait_for()
