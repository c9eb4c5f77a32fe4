"""What tests of the page share: an open page, questions, and answers in the server's place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
expect = sync_api.expect
expect.set_options(timeout=20000)

QUESTION = "def f(x):\n    return"  # what the demo model answers with an endless list
WATCH = """
    window.violations = [];
    document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""


@contextmanager
def visited(browser: Any, address: str, *allowed: str, **options: Any) -> Iterator[Any]:
    """An open page. Errors that are not `allowed`, violations of its policy and requests that leave its
    origin fail the test."""
    context = browser.new_context(**options)
    context.add_init_script(WATCH)
    page = context.new_page()
    page.set_default_timeout(20000)
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda line: errors.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    yield page
    assert page.evaluate("violations") == []
    assert [error for error in errors if not any(part in error for part in allowed)] == []
    assert [url for url in asked if not url.startswith((f"{address}/", "blob:", "data:"))] == []
    assert any(url.endswith("/page/main.js") for url in asked)
    context.close()


def show(page: Any, tab: str) -> None:
    """The panel with this tab, "cache" or "settings"."""
    if not page.locator(f"#{tab}").is_visible():
        page.click(f"#show-{tab}")


def ask(page: Any, text: str = QUESTION, max_tokens: int | None = 12) -> None:
    show(page, "settings")
    page.fill("#set-max_tokens", "" if max_tokens is None else str(max_tokens))
    page.press("#set-max_tokens", "Tab")
    page.fill("#question", text)
    page.press("#question", "Enter")


def finished(page: Any, answers: int = 1) -> str:
    """The text of the last answer, when it is complete."""
    expect(page.locator("article.answer")).to_have_count(answers)
    expect(page.locator("#send")).to_be_visible(timeout=60000)
    return str(page.locator("article.answer > .text").last.inner_text())


def says(page: Any, *deltas: dict[str, Any], end: str = "data: [DONE]\n\n") -> list[dict[str, Any]]:
    """Answers of the server from now on, in its place. Returns the bodies that it will be asked with."""
    bodies: list[dict[str, Any]] = []
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end
        route.fulfill(status=200, content_type="text/event-stream", body=text)

    page.route("**/v1/chat/completions", answer)
    return bodies
