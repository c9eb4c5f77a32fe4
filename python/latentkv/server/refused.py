"""Routes of OpenAI's and llama.cpp's that do not exist here, and why."""

from __future__ import annotations

from fastapi import APIRouter

from latentkv.server.errors import Refused

REASONS = {
    "/v1/embeddings": "embeddings: the runtime decodes, it has no pooled states of a text",
    "/embeddings": "embeddings: the runtime decodes, it has no pooled states of a text",
    "/v1/rerank": "rerank: it needs a model with a score head, which no decoder here has",
    "/v1/audio/transcriptions": "audio: models here read text",
    "/v1/images/generations": "images: models here write text",
}

router = APIRouter()


def _add(path: str, reason: str) -> None:
    @router.post(path, include_in_schema=False)
    async def refuse() -> None:
        raise Refused(501, f"[{path}] expected another route; got {reason}")


for _path, _reason in REASONS.items():
    _add(_path, _reason)
