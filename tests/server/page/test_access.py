"""Phones, keyboards, screen readers, colours that can be told apart."""

from __future__ import annotations

from typing import Any

import pytest
from visiting import QUESTION, ask, expect, finished, says, show, visited


def test_a_phone_sees_the_chat_and_opens_the_sides(browser: Any, server: str) -> None:
    size = {"width": 360, "height": 700}
    with visited(browser, server, viewport=size, has_touch=True, is_mobile=True) as page:
        page.fill("#question", QUESTION)
        says(page, {"content": "| a | b |\n|---|---|\n" + "| long | row |\n" * 3 + "`" + "x" * 200 + "`"})
        page.tap("#send")
        finished(page)
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
        for opener, side in (
            ("#show-cache", "#cache"),
            ("#show-settings", "#settings"),
            ("#show-list", "#list"),
        ):
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


CONTRAST = """() => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const luminance = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map((part) => linear(part / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const { backgroundColor } = getComputedStyle(node);
            if (!/, 0\\)$|transparent/.test(backgroundColor)) return backgroundColor;
        }
    };
    const poor = [];
    for (const node of document.querySelectorAll("body *")) {
        const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
        if (!own || !node.checkVisibility()) continue;
        if (node.closest(".unseen, .skip, :disabled, .katex-mathml")) continue;
        const [a, b] = [getComputedStyle(node).color, behind(node)].map(luminance);
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) poor.push(`${node.className || node.id || node.tagName}: ${ratio.toFixed(2)}`);
    }
    return [...new Set(poor)];
}"""
COLOURFUL = """
Some `code`, a [link](https://example.com), $x^2$ and $\\unknown$.

```python
@decorated
def f(x: int = 1) -> str:  # a remark
    return f"{x}" if x > 0 and len("a") else None
```

```diff
-gone
+added
```

```html
<a class="b">&amp;</a><!-- a remark -->
```

> quoted
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_told_from_what_is_behind_it(browser: Any, server: str, scheme: str) -> None:
    with visited(browser, server, color_scheme=scheme) as page:
        says(page, {"content": COLOURFUL})
        ask(page, "a mean question")
        finished(page)
        expect(page.locator(".hljs-keyword").first).to_be_attached()
        expect(page.locator(".katex").first).to_be_attached()
        page.fill("#search", "question")
        assert page.evaluate(CONTRAST) == []
        show(page, "cache")
        page.click("#bytes summary")
        assert page.evaluate(CONTRAST) == []
