"""Asking, stopping, asking again: what is sent and what is shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from visiting import QUESTION, ask, expect, finished, says, show, visited


def test_chat_streams_what_the_server_answers(page: Any, http: httpx.Client) -> None:
    # of what the server sends: all of a short answer may be there before the page is drawn again
    page.evaluate(
        """() => { window.reads = 0; const { read } = ReadableStreamDefaultReader.prototype;
            ReadableStreamDefaultReader.prototype.read = function () {
                return read.call(this).then((x) => { window.reads += x.done ? 0 : 1; return x; }); }; }"""
    )
    ask(page, max_tokens=48)
    text = finished(page)
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48}
    said = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert re.sub(r"\W+", "", text) == re.sub(r"\W+", "", said)
    assert page.evaluate("window.reads") > 1, "the answer came in one piece"


def test_stop_stops(page: Any, http: httpx.Client) -> None:
    ask(page, max_tokens=None)
    expect(page.locator("article.answer .text").last).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("article.answer footer")).to_contain_text("stopped")
    kept = page.locator("article.answer .text").last.inner_text()
    page.wait_for_timeout(300)
    assert page.locator("article.answer .text").last.inner_text() == kept
    assert not any(slot["is_processing"] for slot in http.get("/slots").json())


def test_regenerate_replaces_the_answer(page: Any) -> None:
    ask(page)
    first = finished(page)
    says(page, {"content": "another answer"})
    page.click("text=Regenerate")
    expect(page.locator("article.answer")).to_contain_text("another answer")
    assert first not in page.locator("#thread").inner_text()
    assert finished(page, answers=1) == "another answer"


def test_an_edited_question_drops_what_followed(page: Any) -> None:
    bodies = says(page, {"content": "yes"})
    ask(page, "first")
    finished(page, 1)
    ask(page, "second")
    finished(page, 2)
    page.hover("article.question >> nth=0")
    page.click("article.question >> nth=0 >> text=Edit")
    page.fill("article.editing textarea", "first, anew")
    page.press("article.editing textarea", "Enter")
    finished(page, 1)
    assert bodies[-1]["messages"] == [{"role": "user", "content": "first, anew"}]
    assert [message["content"] for message in bodies[1]["messages"]] == ["first", "yes", "second"]


def test_reasoning_is_folded_and_calls_are_code(page: Any) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": part}} for part in ('{"city":', '"Bern"}')]
    says(
        page,
        {"reasoning_content": "Let me "},
        {"reasoning_content": "think."},
        {"content": "Here."},
        {"tool_calls": [call]},
        *({"tool_calls": [part]} for part in rest),
    )
    ask(page)
    finished(page)
    expect(page.locator("article.answer > .text")).to_have_text("Here.")
    expect(page.locator("details.thinking .text")).to_be_hidden()
    page.click("details.thinking summary")
    expect(page.locator("details.thinking .text")).to_have_text("Let me think.")
    expect(page.locator(".calls .code-head")).to_contain_text("weather")
    assert json.loads(page.locator(".calls code").inner_text()) == {"city": "Bern"}


def test_errors_are_shown_in_the_servers_words(browser: Any, server: str) -> None:
    with visited(browser, server, "status of 400", "ERR_FAILED") as page:
        show(page, "settings")
        page.fill("#set-top_p", "7")
        page.press("#set-top_p", "Tab")
        ask(page)
        expect(page.locator("article.answer .error")).to_contain_text("top_p")
        says(page, {"content": "half"}, end='data: {"error": {"message": "[context] it is full"}}\n\n')
        page.click("text=Regenerate")
        expect(page.locator("article.answer .error")).to_have_text("[context] it is full")
        expect(page.locator("article.answer > .text")).to_have_text("half")
        says(page, {"content": "half"}, end="")
        page.click("text=Regenerate")
        expect(page.locator("article.answer .error")).to_contain_text("ended before the answer did")
        page.route("**/v1/chat/completions", lambda route: route.abort())
        page.click("text=Regenerate")
        expect(page.locator("article.answer .error")).to_contain_text("does not answer")


def test_settings_are_sent_and_empty_ones_are_not(page: Any) -> None:
    bodies = says(page, {"content": "yes"})
    show(page, "settings")
    expect(page.locator("#set-temperature")).to_have_attribute("placeholder", "0")
    page.fill("#system", "Be brief.")
    for name, value in {"temperature": "0.5", "top_k": "7", "seed": "3"}.items():
        page.fill(f"#set-{name}", value)
    page.press("#set-seed", "Tab")
    ask(page, max_tokens=None)
    finished(page)
    sent = {name: bodies[0].get(name) for name in ("temperature", "top_p", "top_k", "seed", "max_tokens")}
    assert sent == {"temperature": 0.5, "top_p": None, "top_k": 7, "seed": 3, "max_tokens": None}
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_setting_that_is_no_number_is_told_and_not_sent(page: Any) -> None:
    bodies = says(page, {"content": "yes"})
    show(page, "settings")
    page.fill("#set-top_k", "2.5")
    page.press("#set-top_k", "Tab")
    expect(page.locator("#hint-top_k")).to_contain_text("Not sent")
    ask(page)
    finished(page)
    assert "top_k" not in bodies[0]


def test_a_key_is_asked_for_and_kept_for_the_session(
    browser: Any, serve: Callable[..., Any], converted: Callable[..., Path]
) -> None:
    options = ("-c", "256", "--kv", "f32", "--temp", "0", "--api-key", "secret")
    plain = converted("--method", "none", "--outtype", "f32")
    with serve(plain, *options) as address, visited(browser, address, "status of 401") as page:
        page.fill("#key-field", "wrong")
        page.press("#key-field", "Enter")
        expect(page.locator("#key-refused")).to_be_visible()
        page.fill("#key-field", "secret")
        page.press("#key-field", "Enter")
        expect(page.locator("#plan svg")).to_be_attached()
        ask(page)
        text = finished(page)
        page.reload()
        expect(page.locator("#plan svg")).to_be_attached()
        assert finished(page) == text
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
