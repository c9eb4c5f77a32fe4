"""llama.cpp's own routes: health, tokens, slots, properties."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from latentkv.engine.scheduler import Scheduler
from latentkv.server.body import Route
from latentkv.server.schemas import DetokenizeBody, TokenizeBody
from latentkv.server.serving import Serving, serving_of
from latentkv.text import utf8

router = APIRouter(route_class=Route)
Served = Annotated[Serving, Depends(serving_of)]


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(serving: Served) -> dict[str, Any]:
    return {"object": "list", "data": [_model(serving)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, serving: Served) -> dict[str, Any]:
    serving.check_model(name)
    return _model(serving)


# Not async: these run on a thread, their JSON is made there, and other requests go on meanwhile.
@router.post("/tokenize")
def tokenize(body: TokenizeBody, serving: Served) -> JSONResponse:
    text = utf8(body.content, "content")
    serving.check_length(len(text))
    tokens = serving.model.tokenize(text, body.add_special, body.parse_special)
    if not body.with_pieces:
        return JSONResponse({"tokens": tokens})
    return JSONResponse({"tokens": [{"id": token, "piece": _piece(serving, token)} for token in tokens]})


@router.post("/detokenize")
def detokenize(body: DetokenizeBody, serving: Served) -> JSONResponse:
    tokens = serving.tokens(body.tokens)
    text = serving.model.detokenize(tokens, True)
    return JSONResponse({"content": text.decode("utf-8", errors="replace")})


@router.get("/props")
async def props(serving: Served) -> dict[str, Any]:
    sampling = serving.sampling
    return serving.about | {
        "total_slots": len(serving.engine.scheduler.slots),
        "model_alias": serving.name,
        "chat_template": serving.template.source,
        "default_generation_settings": {
            "n_predict": serving.n_predict,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repeat_penalty,
            "seed": sampling.seed,
        },
    }


@router.get("/slots")
def slots(serving: Served) -> list[dict[str, Any]]:
    return serving.engine.call(_slots)


@router.get("/cache")
def cache(serving: Served) -> dict[str, Any]:
    """Bytes of the cache as allocated, how many of its cells hold a token now, and what is kept beside it of
    sequences that have left: bytes in memory and in files, and what they would be if none shared its
    beginning with another."""
    return serving.engine.call(_cache)


def _slots(scheduler: Scheduler) -> list[dict[str, Any]]:
    shown = []
    for slot in scheduler.slots:
        row: dict[str, Any] = {"id": slot.seq, "n_cached": len(slot.tokens), "is_processing": False}
        if slot.job is not None:
            progress = slot.job.ticket.progress
            row |= {
                "is_processing": True,
                "n_prompt_tokens": progress.prompt_tokens,
                "n_prompt_left": 0 if slot.has_read else len(slot.job.pending),
                "n_decoded": progress.completion_tokens,
                "n_limit": slot.job.limit,
            }
        shown.append(row)
    return shown


def _cache(scheduler: Scheduler) -> dict[str, Any]:
    session = scheduler.session
    shown = session.kv_bytes() | {"n_ctx": session.n_ctx, "n_used": session.n_cells_used()}
    store = scheduler.store
    if store is None:
        return shown
    kept = {"sequences": len(store), "ram": store.ram_used, "disk": store.disk_used}
    return shown | {"store": kept | {"unshared": store.unshared}}


def _model(serving: Serving) -> dict[str, Any]:
    meta = {key: serving.about[key] for key in ("n_ctx", "n_ctx_train", "n_vocab", "n_params", "size")}
    shown = {"id": serving.name, "object": "model", "created": serving.created, "owned_by": "latentkv"}
    return shown | {"meta": meta}


def _piece(serving: Serving, token: int) -> str | list[int]:
    piece = serving.model.token_to_piece(token, True)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
