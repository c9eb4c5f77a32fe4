"""The page at / in a headless browser, on the demo model: what it shows, keeps, and never does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
expect = sync_api.expect
expect.set_options(timeout=20000)

QUESTION = "def f(x):\n    return"  # what the demo model answers with an endless list
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WATCH = """
    window.violations = [];
    document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""
HOSTILE = """
# <img src=x onerror="window.hit=1"> heading
<script>window.hit = 1</script> and <b onmouseover="window.hit=1">bold</b>
[click](javascript:window.hit=1) ![image](https://example.com/x.png) [data](data:text/html,<script>1</script>)
<https://example.com/?<script>> `<script>window.hit = 1</script>`

- [ ] <iframe src="https://example.com"></iframe>

| <svg onload="window.hit=1"> | b |
|---|--:|
| <style>*{display:none}</style> | 2 |

```html
<script>window.hit = 1</script>
```
> <form action="https://example.com"><input name=q></form>
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright's own Chromium, or the system's."""
    with sync_api.sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        path = str(own) if own.exists() else next(filter(None, map(shutil.which, BROWSERS)), None)
        if path is None:
            pytest.skip("needs a Chromium (playwright install chromium)")
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


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


@pytest.fixture
def page(browser: Any, server: str) -> Iterator[Any]:
    with visited(browser, server) as opened:
        yield opened


def ask(page: Any, text: str = QUESTION, max_tokens: int | None = 12) -> None:
    page.click("#tab-settings")
    page.fill("#set-max_tokens", "" if max_tokens is None else str(max_tokens))
    page.press("#set-max_tokens", "Tab")
    page.click("#tab-cache")
    page.fill("#question", text)
    page.press("#question", "Enter")


def finished(page: Any, answers: int = 1) -> str:
    """The text of the last answer, when it is complete."""
    expect(page.locator("article.answer")).to_have_count(answers)
    expect(page.locator("#send")).to_be_visible(timeout=60000)
    return str(page.locator("article.answer .text").last.inner_text())


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


def test_settings_are_sent_and_empty_ones_are_not(page: Any) -> None:
    bodies = says(page, {"content": "yes"})
    page.click("#tab-settings")
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
    page.click("#tab-settings")
    page.fill("#set-top_k", "2.5")
    page.press("#set-top_k", "Tab")
    expect(page.locator("#hint-top_k")).to_contain_text("Not sent")
    ask(page)
    finished(page)
    assert "top_k" not in bodies[0]


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


def test_markup_in_an_answer_stays_text(page: Any) -> None:
    says(page, {"content": HOSTILE[:200]}, {"content": HOSTILE[200:]})
    ask(page)
    finished(page)
    answer = page.locator("article.answer > .text").first
    for name in ("script", "img", "iframe", "svg", "style", "form", "b", "[onerror]", "[onload]"):
        assert answer.locator(name).count() == 0, name
    assert set(answer.locator("a").evaluate_all("links => links.map(a => a.protocol)")) == {"https:"}
    assert page.evaluate("window.hit") is None
    for text in ("<script>window.hit = 1</script> and", '<img src=x onerror="window.hit=1">', "<iframe"):
        expect(answer).to_contain_text(text)


MARKDOWN = {
    "# One\n### Three": "<h3>One</h3><h5>Three</h5>",
    "a **b *c*** ~~d~~ __e__ snake_case_name 2 * 3 * 4": "<p>a <strong>b <em>c</em></strong> <del>d</del> "
    "<strong>e</strong> snake_case_name 2 * 3 * 4</p>",
    "***x*** `` a ` b `` \\*y\\*": "<p><em><strong>x</strong></em> <code>a ` b</code> *y*</p>",
    "1. a\n   - b\n2. c": "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>",
    "3) a\n\ntext": '<ol start="3"><li>a</li></ol><p>text</p>',
    "line\nline": "<p>line<br>line</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "unclosed **bold and `code": "<p>unclosed **bold and `code</p>",
}


def test_markdown_is_what_it_says(page: Any) -> None:
    shown = page.evaluate(
        """async (texts) => { const { update } = await import("/page/text/markdown.js");
            return texts.map((text) => { const box = document.createElement("div");
                update(box, text); return box.innerHTML; }); }""",
        list(MARKDOWN),
    )
    assert dict(zip(MARKDOWN, shown, strict=True)) == MARKDOWN


def test_a_growing_answer_is_drawn_as_the_whole_one(page: Any) -> None:
    same = page.evaluate(
        """async (text) => { const { update } = await import("/page/text/markdown.js");
            const [grown, whole] = [document.createElement("div"), document.createElement("div")];
            for (let end = 0; end <= text.length; end++) update(grown, text.slice(0, end));
            update(whole, text); return grown.innerHTML === whole.innerHTML; }""",
        HOSTILE + "\n\n".join(MARKDOWN),
    )
    assert same


def test_markdown_takes_no_time_that_grows_with_the_square(page: Any) -> None:
    seconds = page.evaluate(
        """async () => { const { update } = await import("/page/text/markdown.js");
            const start = performance.now();
            for (const part of ["*a ", "**a_", "[", "](", "`a``", "> ", "- ", "|", "<", "  \\n", "![a]("])
                update(document.createElement("div"), part.repeat(20000 / part.length));
            return (performance.now() - start) / 1000; }"""
    )
    assert seconds < 5


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
        page.click("#tab-settings")
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


def test_the_panels_bytes_are_the_caches(
    browser: Any, serve: Callable[..., Any], converted: Callable[..., Path]
) -> None:
    model = converted("--method", "palu", "--keep", "0.5", "--allocate", "uniform")
    options = ("-c", "512", "-np", "2", "--temp", "0", "--kv", "q8/q4")
    with serve(model, *options) as address, visited(browser, address) as page:
        ask(page)
        finished(page)
        expect(page.locator("#speed")).to_be_visible()
        cache, props = (httpx.get(f"{address}/{name}").json() for name in ("cache", "props"))
        title = f"{cache['total']:,} bytes"
        expect(page.locator("#cache-total")).to_have_attribute("title", title)
        rows = page.locator("#regions tr").all_inner_texts()
        assert [re.split(r"\s+", row)[0] for row in rows] == [each["name"] for each in cache["regions"]]
        for region in cache["regions"]:
            row = page.locator("#regions tr", has_text=region["name"])
            expect(row.locator("td").nth(0)).to_have_text(f"{region['used']:,}")
            size = row.locator("td").nth(2)
            expect(size).to_have_attribute("title", f"{region['k'] + region['v']:,} bytes")
        share = 100 * cache["total"] / props["cache"]["f16_total"]
        expect(page.locator("#cache-share")).to_contain_text(f"{share:.1f} %")
        expect(page.locator("#held")).to_have_text(f"{cache['n_used']:,} of {cache['n_ctx']:,}")
        for side, bits in (("k", 8), ("v", 4)):
            names = [name for row in props["plan"] for group in row[side]["formats"] for name in group]
            assert set(names) == {f"q{bits}"}
            assert page.locator(f"#plan rect.bits-{bits}").count() == len(names)
        page.focus("#plan svg")
        page.keyboard.press("ArrowDown")
        first = props["plan"][0]["k"]
        expect(page.locator("#under")).to_contain_text(f"Layer 0, K {first['path']}")
        expect(page.locator("#under")).to_contain_text(f"{first['segments'][0][0]} channels in")


def test_the_plan_of_a_plain_file_is_the_format_in_use(page: Any, http: httpx.Client) -> None:
    props = http.get("/props").json()
    heads = props["n_layer"] * props["n_head_kv"] * 2
    expect(page.locator("#plan rect.bits-16")).to_have_count(heads)
    expect(page.locator("#legend")).to_contain_text("f32")


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
        expect(page.locator("#plan svg")).to_be_visible()
        ask(page)
        text = finished(page)
        page.reload()
        expect(page.locator("#plan svg")).to_be_visible()
        assert finished(page) == text
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_phone_sees_the_chat_and_opens_the_sides(browser: Any, server: str) -> None:
    size = {"width": 360, "height": 700}
    with visited(browser, server, viewport=size, has_touch=True, is_mobile=True) as page:
        page.fill("#question", QUESTION)
        says(page, {"content": "| a | b |\n|---|---|\n" + "| long | row |\n" * 3 + "`" + "x" * 200 + "`"})
        page.tap("#send")
        finished(page)
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
        for opener, side in (("#show-panel", "#panel"), ("#show-list", "#list")):
            expect(page.locator(side)).to_be_hidden()
            page.tap(opener)
            expect(page.locator(side)).to_be_visible()
            page.keyboard.press("Escape")
            expect(page.locator(side)).to_be_hidden()


def test_everything_that_is_operated_has_a_name(page: Any) -> None:
    ask(page)
    finished(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, summary, [role=img]")]
            .filter((each) => !(each.textContent.trim() || each.ariaLabel || each.labels?.length))
            .map((each) => each.outerHTML)"""
    )
    assert nameless == []
