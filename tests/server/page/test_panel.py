"""The panel: what it says of the cache, and when it is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from visiting import ask, expect, finished, show, visited


def test_the_panels_bytes_are_the_caches(
    browser: Any, serve: Callable[..., Any], converted: Callable[..., Path]
) -> None:
    model = converted("--method", "palu", "--keep", "0.5", "--allocate", "uniform")
    options = ("-c", "512", "-np", "2", "--temp", "0", "--kv", "q8/q4")
    with serve(model, *options) as address, visited(browser, address) as page:
        ask(page)
        finished(page)
        show(page, "cache")
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


def test_a_plain_file_has_one_line_until_one_asks(page: Any, http: httpx.Client) -> None:
    expect(page.locator("#cache-line")).to_be_visible()
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.locator("#welcome")).to_contain_text("demo")
    cache, props = (http.get(f"/{name}").json() for name in ("cache", "props"))
    share = 100 * cache["total"] / props["cache"]["f16_total"]
    for part in (
        f" of {cache['total'] / 2**20:.1f} MiB",
        f"{share:.1f} % of f16",
        f" of {cache['n_ctx']:,} tokens",
    ):
        expect(page.locator("#cache-line")).to_contain_text(part)
    show(page, "settings")
    expect(page.locator("#cache-line")).to_be_hidden()  # the title needs the room
    show(page, "cache")
    expect(page.locator("#bytes-line")).to_be_visible()
    for part in ("#regions", "#plan svg"):
        expect(page.locator(part)).to_be_hidden()
    page.click("#bytes summary")
    expect(page.locator("#regions")).to_be_visible()
    page.reload()
    expect(page.locator("#regions")).to_be_visible()
    page.click("#panel .close-side")
    page.reload()
    expect(page.locator("#cache-line")).to_be_visible()
    expect(page.locator("#panel")).to_be_hidden()
