"""Formulas: what is one and what is none, and that nothing but a formula comes of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from visiting import ask, expect, finished, says

SHOWN = """async (texts) => { const { update } = await import("/page/text/markdown.js");
    return texts.map((text) => { const box = document.createElement("div");
        update(box, text); document.body.append(box);
        return [...box.querySelectorAll(".formula")].map((each) => each.textContent); }); }"""
SET = """async (text) => { const { update } = await import("/page/text/markdown.js");
    const box = document.createElement("div");
    box.id = "set"; document.getElementById("set")?.remove();
    document.getElementById("thread").append(box); document.getElementById("welcome").hidden = true;
    update(box, text); }"""

FORMULAS: dict[str, list[str]] = {
    "so $x^2$ and \\(y\\), $5$.": ["$x^2$", "\\(y\\)", "$5$"],
    "$$a$$ or \\[b\\] within": ["$$a$$", "\\[b\\]"],
    "text\n$$\na\n\n- b\n$$\ntext": ["$$\na\n\n- b\n$$"],
    "- item\n  \\[\n  a + b\n  \\],": ["\\[\na + b\n\\],"],
    "> \\begin{align}\n> a &= b\n> \\end{align}": ["\\begin{align}\na &= b\n\\end{align}"],
    "| a |\n|---|\n| $x$ |": ["$x$"],
    "**bold $a_1 * b_1$ and *$c$***": ["$a_1 * b_1$", "$c$"],
    "$\\text{if } x > \\$5$": ["$\\text{if } x > \\$5$"],
    "$5 and $6": [],
    "from $5 to 10$, or $1,000/$2,000 and US$5": [],
    "$5, then $x$ for $6": ["$x$"],
    "$ a $ and $HOME/$PATH": [],
    "5$ each, 6$ for two": [],
    "\\$x\\$ and `$x$` and ``\\(x\\)``": [],
    "```\n$$x$$\n\\[y\\]\n```": [],
    "    $$": [],
    "open $x + \\frac{1": [],
    "open \\(x and \\[y and $$z": [],
    "$$\nopen": [],
    "[$x$](https://example.com)": ["$x$"],
}


def test_formulas_are_found_and_sums_of_money_are_not(page: Any) -> None:
    shown = page.evaluate(SHOWN, list(FORMULAS))
    assert dict(zip(FORMULAS, shown, strict=True)) == FORMULAS


def test_formulas_are_set_and_copied_as_what_they_were(page: Any) -> None:
    vendored = page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
    assert not any("/vendor/" in name for name in vendored), "libraries are loaded when they are needed"
    says(page, {"content": "So $\\frac{1}"}, {"content": "{2}$ and\n\n$$\nx"}, {"content": "^2\n$$"})
    ask(page)
    finished(page)
    answer = page.locator("article.answer > .text")
    expect(answer.locator(".katex")).to_have_count(2)
    expect(answer.locator(".katex-display")).to_have_count(1)
    expect(answer.locator("mfrac")).to_have_count(1)
    # awaited in the page, as its policy lets no test ask again by eval
    assert page.evaluate("document.fonts.load('16px KaTeX_Main').then((faces) => faces.length)") > 0
    assert answer.locator("annotation").all_text_contents() == ["\\frac{1}{2}", "x^2"]


def test_a_growing_formula_is_set_as_the_whole_one(page: Any) -> None:
    page.evaluate(SET, "$x$")
    expect(page.locator("#set .katex")).to_be_attached()
    same = page.evaluate(
        """async (text) => { const { update } = await import("/page/text/markdown.js");
            const [grown, whole] = [document.createElement("div"), document.createElement("div")];
            for (let end = 0; end <= text.length; end++) update(grown, text.slice(0, end));
            update(whole, text);
            return grown.innerHTML === whole.innerHTML && whole.querySelectorAll(".katex").length; }""",
        "\n\n".join(FORMULAS),
    )
    assert same == sum(map(len, FORMULAS.values()))


HOSTILE = [
    "\\href{javascript:window.hit=1}{click}",
    "\\href{https://example.com}{click}",
    "\\url{javascript:window.hit=1}",
    "\\includegraphics{https://example.com/x.png}",
    "\\htmlClass{skip main}{x}",
    "\\htmlId{question}{x}",
    "\\htmlStyle{position: fixed; inset: 0}{x}",
    "\\htmlData{onclick=window.hit=1}{x}",
    "\\text{<img src=x onerror='window.hit=1'>}",
    "\\color{red;background:url(https://example.com)}x",
    "\\textcolor{javascript:1}{x}",
    "<script>window.hit = 1</script>",
    "\\pmb{x} \\fcolorbox{red}{blue}{x} \\cancel{x}",
    "\\def\\a{\\a\\a}\\a",
    "\\edef\\a{\\a\\a}\\a",
    "{" * 3000,
    "x^" * 1000,
    "\\rule{9999em}{9999em}",
    "\\kern-9999em x \\raisebox{9999em}{x}",
    "\\newcommand{\\frac}{window.hit}\\frac",
    "\\frac{",
    "\\unknown",
]


@pytest.mark.parametrize(("open_", "close"), [("$", "$"), ("$$\n", "\n$$")])
def test_hostile_formulas_are_formulas_or_text(page: Any, open_: str, close: str) -> None:
    page.evaluate(SET, "$x$")
    expect(page.locator("#set .katex")).to_be_attached()
    start = page.evaluate("performance.now()")
    page.evaluate(SET, "\n\n".join(f"{open_}{each}{close}" for each in HOSTILE))
    assert page.evaluate("performance.now()") - start < 5000
    box = page.locator("#set")
    for name in (
        "script",
        "img",
        "a",
        "iframe",
        "style",
        "[onclick]",
        "[onerror]",
        "[data-onclick]",
        "#question",
    ):
        assert box.locator(name).count() == 0, name
    assert box.locator(".skip, .main").count() == 0
    assert page.evaluate("window.hit") is None
    # one formula defines nothing for the next
    page.evaluate(SET, "$\\gdef\\seven{7}\\seven$ and $\\seven$")
    assert box.locator("mtext, mn").all_text_contents() == ["7", "\\seven"]
    # nothing leaves its answer
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_page_without_the_library_shows_the_source(page: Any, http: httpx.Client) -> None:
    page.route("**/katex.min.css", lambda route: route.fulfill(status=200, content_type="text/css", body=""))
    page.route(
        "**/katex.min.js", lambda route: route.fulfill(status=200, content_type="text/javascript", body="")
    )
    page.evaluate(SET, "so $x^2$")
    page.wait_for_timeout(200)
    expect(page.locator("#set")).to_have_text("so $x^2$")
