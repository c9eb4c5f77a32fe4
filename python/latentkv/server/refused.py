"""Routes of OpenAI and llama.cpp that do not exist here, and the reasons."""

from __future__ import annotations

from fastapi import APIRouter

from latentkv.server.errors import Refused

_RERANK = "rerank: it needs a model with a score head, which no decoder here has"
_AUDIO = "audio: models here read text"
_ROUTER = "one model, which the command line names"

REASONS = {
    "/v1/rerank": _RERANK,
    "/v1/reranking": _RERANK,
    "/rerank": _RERANK,
    "/reranking": _RERANK,
    "/v1/audio/transcriptions": _AUDIO,
    "/audio/transcriptions": _AUDIO,
    "/v1/images/generations": "images: models here write text",
    "/props": "properties that stay as the command line has them: GET them",
    "/models/load": _ROUTER,
    "/models/unload": _ROUTER,
    "/v1/chat/completions/control": "control: an answer ends when its client goes away",
}

router = APIRouter()


def _add(path: str, reason: str) -> None:
    @router.post(path, include_in_schema=False)
    async def refuse() -> None:
        raise Refused(501, f"[{path}] expected another route; got {reason}")


for _path, _reason in REASONS.items():
    _add(_path, _reason)
