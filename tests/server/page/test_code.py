"""Colours of code: what is coloured, that the code stays what it was, and what it costs."""

from __future__ import annotations

import json
from typing import Any

from visiting import ask, expect, finished, says

CODES = {
    "python": 'def f(x):\n    return "<b>" + x  # it\'s & more',
    "html": '<script>window.hit = 1</script><img src=x onerror="window.hit=1">&lt;<!-- <b>x</b> -->',
    "js": "const a = `<img src=x onerror=window.hit=1>${'</span><script>window.hit=1</script>'}`;",
    "markdown": "[a](javascript:window.hit=1) <b onclick=window.hit=1>b</b> **c**",
    "php": "<?php echo '<svg onload=window.hit=1>'; ?><style>* { display: none }</style>",
    "C++": 'auto s = R"(</code></pre><script>window.hit=1</script>)";',
    "json": '{"a": [1, null, "</span>"]}',
    "diff": "- <b>\n+ <i>",
    "sh": "echo $HOME && ls | grep '<'",
}
BOTH = """async ([text, step]) => { const { update } = await import("/page/text/markdown.js");
    const [grown, whole] = [document.createElement("div"), document.createElement("div")];
    for (let end = 0; end <= text.length; end += step) update(grown, text.slice(0, end));
    update(grown, text);
    update(whole, text);
    const same = () => grown.innerHTML === whole.innerHTML && whole.querySelector(".hljs-keyword");
    for (let tries = 0; tries < 100 && !same(); tries++) await new Promise((done) => setTimeout(done, 50));
    const [a, b] = [grown, whole].map((each) => each.querySelector("code").textContent);
    return Boolean(same()) && a === b; }"""


def test_code_is_coloured_and_stays_what_it_was(page: Any) -> None:
    says(page, {"content": "\n\n".join(f"```{name}\n{code}\n```" for name, code in CODES.items())})
    ask(page)
    finished(page)
    blocks = page.locator("article.answer .code")
    expect(blocks.locator("code:has([class^=hljs-])")).to_have_count(len(CODES))
    assert blocks.locator("code").evaluate_all("all => all.map((each) => each.textContent)") == list(
        CODES.values()
    )
    assert blocks.locator("code :not(span)").count() == 0
    assert set(
        blocks.locator("code span").evaluate_all("all => all.flatMap((each) => each.getAttributeNames())")
    ) == {"class"}
    assert page.evaluate("window.hit") is None


def test_unknown_languages_and_plain_code_have_no_colours(page: Any) -> None:
    says(page, {"content": "```python\nx = 1\n```\n\n```klingon\nif x\n```\n\n```\nif x\n```\n\n    if x"})
    ask(page)
    finished(page)
    expect(page.locator("article.answer code:has(span)")).to_have_count(1)


def test_a_call_of_a_tool_has_colours(page: Any) -> None:
    call = {
        "index": 0,
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"a": 1})},
    }
    says(page, {"tool_calls": [call]})
    ask(page)
    finished(page)
    expect(page.locator(".calls .hljs-number")).to_have_text("1")


def test_code_that_grows_is_coloured_as_the_whole(page: Any) -> None:
    assert page.evaluate(BOTH, ["```python\n" + CODES["python"] + "\n```\n\nend", 1])
    long = "def f(x):\n    return x\n" * 500
    assert page.evaluate(BOTH, [f"```python\n{long}```", 200])


def test_code_that_takes_long_keeps_nobody_waiting(page: Any) -> None:
    """C++ of this kind takes time that grows with the square of its length: minutes for this much."""
    seconds, count = page.evaluate(
        """async (text) => { const { codeBlock } = await import("/page/text/code_block.js");
            const place = document.getElementById("thread");
            document.getElementById("welcome").hidden = true;
            const start = performance.now();
            place.append(codeBlock(text, "cpp"), codeBlock("x = 1", "python"));
            await new Promise(requestAnimationFrame);
            return [(performance.now() - start) / 1000, place.querySelector("code").textContent.length]; }""",
        "a b c " * 30000,
    )
    assert seconds < 1
    assert count == 6 * 30000
    expect(page.locator("code >> nth=1 >> .hljs-number")).to_have_text("1")
    assert page.locator("code >> nth=0").locator("span").count() == 0
