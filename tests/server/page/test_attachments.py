"""Text files that go with a question: what the model reads, what is shown, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from visiting import expect, finished, says

DROP = """([name, text]) => { const files = new DataTransfer();
    files.items.add(new File([text], name));
    for (const type of ["dragover", "drop"])
        document.getElementById("question").dispatchEvent(
            new DragEvent(type, { dataTransfer: files, bubbles: true, cancelable: true })); }"""
PASTE = """(text) => { const pasted = new DataTransfer();
    pasted.setData("text/plain", text);
    const event = new ClipboardEvent("paste", { clipboardData: pasted, bubbles: true, cancelable: true });
    return document.getElementById("question").dispatchEvent(event); }"""


def file(name: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": "application/octet-stream", "buffer": data}


def attach(page: Any, *files: dict[str, Any]) -> None:
    page.set_input_files("#attachments", list(files))


def send(page: Any, text: str = "") -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def test_the_model_reads_files_as_fenced_blocks(page: Any) -> None:
    bodies = says(page, {"content": "yes"})
    attach(page, file("a.py", b"print(1)\r\n"), file("b.md", b"\xef\xbb\xbf# B\n```\nx\n```\n"))
    expect(page.locator("#chips .chip-name")).to_have_text(["a.py", "b.md"])
    page.evaluate(DROP, ["c.txt", "dropped"])
    attach(page, file("a.py", b"print(2)"), file("d.txt", "\ufeffzwölf".encode("utf-16-le")))
    expect(page.locator("#chips .chip-name")).to_have_text(["b.md", "c.txt", "a.py", "d.txt"])
    page.click("[aria-label='Remove c.txt']")
    send(page, "What is it?")
    finished(page)
    blocks = [
        "`b.md`:\n````markdown\n# B\n```\nx\n```\n````",
        "`a.py`:\n```python\nprint(2)\n```",
        "`d.txt`:\n```\nzwölf\n```",
        "What is it?",
    ]
    assert bodies[0]["messages"] == [{"role": "user", "content": "\n\n".join(blocks)}]
    expect(page.locator("#chips")).to_be_hidden()
    expect(page.locator("article.question .chip-name")).to_have_text(["b.md", "a.py", "d.txt"])
    expect(page.locator("article.question .text")).to_have_text("What is it?")


def test_what_is_no_text_or_too_large_is_refused_in_a_sentence(page: Any) -> None:
    refused = {
        "cat.png": b"\x89PNG\r\n\x1a\n\x00\x00",
        "latin.txt": "zwölf".encode("latin-1"),
        "zero.bin": b"text\x00text",
        "empty.txt": b" \n",
        "large.log": b"x" * (512 * 1024 + 1),
    }
    told = (
        "not text in UTF-8",
        "not text in UTF-8",
        "not text in UTF-8",
        "is empty",
        "a file may have 512.0 KiB",
    )
    for (name, data), sentence in zip(refused.items(), told, strict=True):
        attach(page, file(name, data))
        expect(page.locator("#notice.error")).to_contain_text(name)
        expect(page.locator("#notice.error")).to_contain_text(sentence)
    expect(page.locator("#chips li")).to_have_count(0)
    attach(page, file("good.txt", b"good"), file("cat.png", refused["cat.png"]))
    expect(page.locator("#chips .chip-name")).to_have_text(["good.txt"])
    most = b"x" * 512 * 1024
    attach(page, file("1.log", most), file("2.log", most))
    expect(page.locator("#notice.error")).to_contain_text("a question may take 1.0 MiB along")
    expect(page.locator("#chips .chip-name")).to_have_text(["good.txt", "1.log"])


def test_a_long_text_is_pasted_as_a_file_and_a_short_one_as_text(page: Any) -> None:
    bodies = says(page, {"content": "yes"})
    assert page.evaluate(PASTE, "short"), "the browser pastes it"
    long = "line\n" * 50
    assert not page.evaluate(PASTE, long)
    assert not page.evaluate(PASTE, "w" * 2001)
    expect(page.locator("#chips .chip-name")).to_have_text(["pasted-1.txt", "pasted-2.txt"])
    page.click("#notice >> text=Put it into the field")
    expect(page.locator("#question")).to_have_value("w" * 2001)
    expect(page.locator("#chips .chip-name")).to_have_text(["pasted-1.txt"])
    send(page)
    finished(page)
    assert bodies[0]["messages"][0]["content"] == f"`pasted-1.txt`:\n```\n{long}```"
    expect(page.locator("#heading")).to_have_text("pasted-1.txt")


def test_files_are_kept_edited_and_taken_elsewhere(page: Any, tmp_path: Path) -> None:
    bodies = says(page, {"content": "yes"})
    attach(page, file("a.txt", b"A"), file("b.txt", b"B"))
    send(page, "first")
    finished(page)
    page.reload()
    page.hover("article.question")
    page.click("article.question >> text=Edit")
    page.click("article.editing >> [aria-label='Remove b.txt']")
    page.press("article.editing textarea", "Enter")
    finished(page)
    assert bodies[-1]["messages"][0]["content"] == "`a.txt`:\n```\nA\n```\n\nfirst"
    with page.expect_download() as download:
        page.click("#export")
    path = tmp_path / "conversations.json"
    download.value.save_as(path)
    page.hover("#conversations li")
    page.click("[aria-label^=Delete]")
    page.set_input_files("#file", path)
    page.click("#conversations .title")
    expect(page.locator("article.question .chip-name")).to_have_text(["a.txt"])
    kept = json.loads(path.read_text())
    kept["conversations"][0]["messages"][0]["attachments"][0]["text"] = 1
    path.write_text(json.dumps(kept))
    page.set_input_files("#file", path)
    expect(page.locator("#notice")).to_contain_text("lacks a field")


def test_names_and_contents_of_files_stay_text(page: Any) -> None:
    bodies = says(page, {"content": "yes"})
    name = "<img src=x onerror='window.hit=1'>`.html"
    attach(page, file(name, b"<script>window.hit = 1</script>"))
    send(page, "What?")
    finished(page)
    assert "`<img src=x onerror='window.hit=1'> .html`:" in bodies[0]["messages"][0]["content"]
    page.click("article.question .chip-open")
    expect(page.locator("#attachment-name")).to_have_text(name)
    expect(page.locator("#attachment code")).to_have_text("<script>window.hit = 1</script>")
    expect(page.locator("#attachment .hljs-tag").first).to_be_visible()
    assert page.locator("#thread img, #attachment script, #attachment img").count() == 0
    assert page.evaluate("window.hit") is None
    page.keyboard.press("Escape")
    expect(page.locator("#attachment")).to_be_hidden()
