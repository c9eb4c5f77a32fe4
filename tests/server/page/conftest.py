"""The page at / in a headless browser, on the demo model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from visiting import sync_api, visited

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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


@pytest.fixture
def page(browser: Any, server: str) -> Iterator[Any]:
    with visited(browser, server) as opened:
        yield opened
