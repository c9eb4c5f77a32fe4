"""Markdown of an answer: what it becomes, and what it never becomes."""

from __future__ import annotations

from typing import Any

from visiting import ask, expect, finished, says

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


TABLE = (
    '<div class="table" tabindex="0" role="group" aria-label="table"><table>'
    "<thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>c</td><td>d</td></tr></tbody></table></div>"
)
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
    "text:\n|a|b|\n|-|-|\n|c|d|": f"<p>text:</p>{TABLE}",
    "- text\n\n|a|b|\n|-|-|\n|c|d|": f"<ul><li>text</li></ul>{TABLE}",
    "- text\n|a|b|\n|-|-|\n|c|d|": f"<ul><li>text</li></ul>{TABLE}",
    "- text\n  |a|b|\n  |-|-|\n  |c|d|": f"<ul><li>text{TABLE}</li></ul>",
    "a|b\ntext\n--\na": "<p>a|b<br>text<br>--<br>a</p>",
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
            for (const part of ["*a ", "**a_", "[", "](", "`a``", "> ", "- ", "|", "<", "  \\n", "![a](",
                "$", "$a", "$$\\n", "\\\\(", "\\\\[\\n", "\\\\begin{align}\\n"])
                update(document.createElement("div"), part.repeat(20000 / part.length));
            return (performance.now() - start) / 1000; }"""
    )
    assert seconds < 5


def test_text_runs_in_the_direction_of_its_script(page: Any) -> None:
    says(page, {"content": "Latin text.\n\nمرحبا بالعالم\n\n- a\n  - b"})
    ask(page, "مرحبا")
    finished(page)
    lefts = """() => {
        const box = document.querySelector("article.answer > .text").getBoundingClientRect();
        return [...document.querySelectorAll("article.answer > .text > p")].map((p) => {
            const range = document.createRange();
            range.selectNodeContents(p);
            return range.getBoundingClientRect().left - box.left;
        });
    }"""
    latin, arabic = page.evaluate(lefts)
    assert latin < 1
    assert arabic > 100
    nested = page.locator("article.answer li ul").evaluate("list => getComputedStyle(list).marginTop")
    assert float(nested.removesuffix("px")) < 4  # a list within a list is no paragraph
