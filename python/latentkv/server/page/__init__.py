"""GET /: the chat page. The files of this folder are served unchanged; vendor/ contains builds of other
projects with their licences."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse

from latentkv.server.errors import Refused

_KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_ROOT = Path(__file__).parent
_FILES = {path.relative_to(_ROOT).as_posix(): path for path in _ROOT.rglob("*") if path.suffix in _KINDS}
# nothing from anywhere else, and no script that is not a file of ours
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter()


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    return _file("index.html", request)


@router.get("/page/{name:path}", include_in_schema=False)
async def part(name: str, request: Request) -> Response:
    return _file(name, request)


def _file(name: str, request: Request) -> Response:
    """The file, or 304 if the browser already has it."""
    if name not in _FILES:
        raise Refused(404, f"[page] expected a file of the page, such as main.js; got {name}")
    path = _FILES[name]
    answer = FileResponse(path, media_type=_KINDS[path.suffix], headers=_HEADERS, stat_result=path.stat())
    tag = answer.headers["etag"]
    held = request.headers.get("if-none-match", "").split(",")
    if tag in (each.strip().removeprefix("W/") for each in held):
        return Response(status_code=304, headers=_HEADERS | {"ETag": tag})
    return answer
