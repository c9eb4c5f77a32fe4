"""The page's files as the server hands them out, and the other projects' files among them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

import latentkv.server.page as page

ROOT = Path(page.__file__).parent
VENDORED = sorted(path for path in (ROOT / "vendor").iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("main.js", "text/javascript"),
        ("vendor/katex/katex.min.css", "text/css"),
        ("vendor/katex/fonts/KaTeX_Main-Regular.woff2", "font/woff2"),
    ],
)
def test_files_are_strict_and_sent_once(http: Any, name: str, kind: str) -> None:
    first = http.get(f"/page/{name}")
    assert first.content == (ROOT / name).read_bytes()
    assert first.headers["content-type"].split(";")[0] == kind
    assert "default-src 'self'" in first.headers["content-security-policy"]
    assert "unsafe" not in first.headers["content-security-policy"]
    again = http.get(f"/page/{name}", headers={"If-None-Match": f'"other", {first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    for header in ("content-security-policy", "cache-control", "etag"):
        assert again.headers[header] == first.headers[header]
    assert http.get(f"/page/{name}", headers={"If-None-Match": '"other"'}).status_code == 200


def test_only_files_of_the_page_are_served(http: Any) -> None:
    for name in ("__init__.py", "vendor/katex/VERSION", "../about.py", "%2e%2e/about.py", "vendor/katex"):
        assert http.get(f"/page/{name}").status_code == 404, name


@pytest.mark.parametrize("folder", VENDORED, ids=lambda folder: folder.name)
def test_vendored_files_are_those_of_their_version(folder: Path) -> None:
    assert "Copyright" in (folder / "LICENSE").read_text()
    lines = [
        line.split() for line in (folder / "VERSION").read_text().splitlines() if line.startswith("sha256 ")
    ]
    scripts = {path.name for path in folder.iterdir() if path.suffix in (".js", ".css")}
    assert {name for _, _, name in lines} == scripts
    for _, digest, name in lines:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
