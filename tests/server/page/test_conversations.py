"""Conversations in the browser: kept, named, searched, taken elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visiting import QUESTION, ask, expect, finished, says


def test_a_reload_keeps_the_conversation(page: Any) -> None:
    ask(page)
    text = finished(page)
    page.reload()
    assert finished(page) == text
    expect(page.locator("article.question .text")).to_have_text(QUESTION)
    expect(page.locator("#conversations .title")).to_have_text(QUESTION.split("\n")[0])


def test_a_reload_in_the_middle_keeps_what_was_there(page: Any) -> None:
    ask(page, max_tokens=None)
    expect(page.locator("article.answer > .text li")).not_to_have_count(0)
    page.reload()
    expect(page.locator("article.answer > .text li")).not_to_have_count(0)
    expect(page.locator("article.answer footer")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_visible()


def test_an_answer_goes_on_while_another_conversation_is_open(page: Any) -> None:
    ask(page, max_tokens=1000)
    expect(page.locator("article.answer .text").last).not_to_be_empty()
    page.click("#new")
    expect(page.locator("article")).to_have_count(0)
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#conversations .busy")).to_have_count(1)
    page.fill("#question", "What is a cache?")
    page.press("#question", "Enter")
    finished(page)
    expect(page.locator("#conversations .busy")).to_have_count(0, timeout=60000)
    page.click("#conversations li:last-child .title")
    finished(page)
    expect(page.locator("article.answer footer")).to_contain_text("1,000 tokens")


def test_conversations_are_renamed_deleted_exported_and_imported(page: Any, tmp_path: Path) -> None:
    says(page, {"content": "yes"})
    ask(page)
    finished(page)
    page.hover("#conversations li")
    page.click("[aria-label^=Rename]")
    page.fill("#conversations input", "A story")
    page.press("#conversations input", "Enter")
    expect(page.locator("#heading")).to_have_text("A story")
    with page.expect_download() as download:
        page.click("#export")
    path = tmp_path / "conversations.json"
    download.value.save_as(path)
    page.hover("#conversations li")
    page.click("[aria-label^=Delete]")
    expect(page.locator("#conversations li")).to_have_count(0)
    page.set_input_files("#file", path)
    expect(page.locator("#conversations .title")).to_have_text("A story")
    page.click("#conversations .title")
    assert finished(page) == "yes"
    path.write_text(path.read_text().replace('"assistant"', '"stranger"'))
    page.set_input_files("#file", path)
    expect(page.locator("#notice")).to_contain_text("lacks a field")
    expect(page.locator("#conversations li")).to_have_count(1)


def said(page: Any, *questions: str) -> None:
    """A conversation for each question."""
    for question in questions:
        page.click("#new")
        page.fill("#question", question)
        page.press("#question", "Enter")
        finished(page)


def test_search_finds_titles_answers_and_files(page: Any) -> None:
    says(page, {"content": "It **flows** to the `Black Sea`. 3 > 2 (really)."})
    expect(page.locator("#searching")).to_be_hidden()
    page.set_input_files("#attachments", {"name": "maps.csv", "mimeType": "", "buffer": b"Ister,2850\n"})
    said(page, "The Danube, <b>where</b> to?\nAnd the Rhine?", "Name a lake")
    titles = page.locator("#conversations .name")
    expect(titles).to_have_count(2)
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    for words, count in {
        "danube": 1,
        "sea black": 2,
        "SEA lake": 1,
        "ister": 1,
        "maps.csv": 1,
        "<b>": 1,
    }.items():
        page.fill("#search", words)
        expect(titles).to_have_count(count)
        expect(page.locator("#found")).to_contain_text(f"{count} conversation")
    for words in ("(really", "3 >", "2 (", "[.*", "\\"):
        page.fill("#search", words)
        expect(titles).to_have_count(0 if words in ("[.*", "\\") else 2)
    expect(page.locator("#no-conversations")).to_have_text("Nothing found.")
    assert page.locator("#conversations b").count() == 0
    page.fill("#search", "rhine")
    expect(page.locator("#conversations .passage mark")).to_have_text("Rhine")


def test_search_is_for_the_keyboard(page: Any) -> None:
    says(page, {"content": "of the sea"})
    said(page, "first", "second", "third")
    page.click("#thread")
    page.keyboard.press("/")
    page.keyboard.type("copy")
    expect(page.locator("#no-conversations")).to_be_visible()
    page.fill("#search", "sea")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#conversations .title").nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#heading")).to_have_text("second")
    assert page.evaluate("[...CSS.highlights.get('hit')].map((range) => range.toString())") == ["sea"]
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    expect(page.locator("#question")).to_be_focused()
    expect(page.locator("#conversations .name")).to_have_count(3)
    assert page.evaluate("CSS.highlights.get('hit').size") == 0
    page.keyboard.type("a/b")
    expect(page.locator("#question")).to_have_value("a/b")


def test_a_conversation_opens_where_the_words_are(page: Any) -> None:
    says(page, {"content": "\n\n".join(f"line {count}" for count in range(200))})
    said(page, "lines", "other lines")
    assert page.evaluate("document.getElementById('scroller').scrollTop") > 1000, (
        "an answer is followed to its end"
    )
    page.fill("#search", "line 42")
    page.press("#search", "Enter")
    expect(page.locator("text='line 42'")).to_be_in_viewport()
    expect(page.locator("text='line 199'")).not_to_be_in_viewport()
