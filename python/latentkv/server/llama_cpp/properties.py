"""What llama.cpp's server reports about itself: health, models, tokens, slots, properties and adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from latentkv.engine.scheduler import Scheduler
from latentkv.errors import expected
from latentkv.server.body import Route
from latentkv.server.errors import Refused
from latentkv.server.llama_cpp.prompts import mixed_tokens
from latentkv.server.llama_cpp.settings import settings_of
from latentkv.server.schemas import DetokenizeBody, TokenizeBody
from latentkv.server.serving import Serving, serving_of
from latentkv.version import version

_VOCAB_TYPES = {"llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5}  # llama.h, enum llama_vocab_type

router = APIRouter(route_class=Route)
Served = Annotated[Serving, Depends(serving_of)]


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(serving: Served) -> dict[str, Any]:
    """OpenAI's list of models, and Ollama's beside it, as clients of llama.cpp's server expect."""
    shown = {"name": serving.name, "model": serving.name, "type": "model", "capabilities": ["completion"]}
    details = {"format": "gguf", "family": serving.about["architecture"] or ""}
    return {"object": "list", "data": [_model(serving)], "models": [shown | {"details": details}]}


@router.get("/v1/models/{name:path}")
async def model(name: str, serving: Served) -> dict[str, Any]:
    serving.check_name(name)
    return _model(serving)


# Not async: these run on a thread, their JSON is made there, and other requests go on meanwhile.
@router.post("/tokenize")
def tokenize(body: TokenizeBody, serving: Served) -> JSONResponse:
    tokens = mixed_tokens(serving, body.content, body.parse_special, body.add_special)
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
    n_ctx, model = serving.scheduler.n_ctx_seq, serving.model
    return serving.about | {
        "default_generation_settings": {
            "n_ctx": n_ctx,
            "params": settings_of(serving.sampling, n_ctx, serving.n_predict),
        },
        "total_slots": len(serving.scheduler.slots),
        "model_alias": serving.name,
        "model_path": serving.path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": serving.template.source,
        "chat_template_caps": dict(serving.template.capabilities),
        "bos_token": _special(serving, model.token_bos()),
        "eos_token": _special(serving, model.token_eos()),
        "build_info": f"latentkv {version()}",
        "is_sleeping": False,
    }


@router.get("/slots")
def slots(serving: Served, fail_on_no_slot: int = 0) -> list[dict[str, Any]]:
    found = serving.engine.call(_slots)
    if fail_on_no_slot and all(slot["is_processing"] for slot in found):
        raise Refused(503, f"[slots] expected an idle one; got {len(found)} that answer")
    return found


@router.post("/slots/{slot}")
def change_slot(slot: int, serving: Served, action: Literal["erase", "save", "restore"]) -> dict[str, int]:
    """Erases a slot: the sequence loses its tokens. --cache-dir keeps rows in files; they have no names."""
    count = len(serving.scheduler.slots)
    if not 0 <= slot < count:
        raise expected("id_slot", f"0 … {count - 1}", slot)
    if action != "erase":
        said = "what loses its place is kept by itself, with --cache-dir in files"
        raise Refused(501, f"[slots] expected the action erase; got {action}: {said}")
    return {"id_slot": slot, "n_erased": serving.engine.call(lambda scheduler: scheduler.erase(slot))}


@router.get("/lora-adapters")
async def adapters() -> list[dict[str, Any]]:
    """No adapters: they are merged before a model is converted."""
    return []


@router.post("/lora-adapters")
async def set_adapters(body: list[dict[str, Any]]) -> dict[str, bool]:
    if body:
        raise expected(
            "lora-adapters", "an empty list", f"{len(body)} of them", "merge them before converting"
        )
    return {"success": True}


@router.get("/cache")
def cache(serving: Served) -> dict[str, Any]:
    """Bytes of the cache as allocated, how many of its cells hold a token now, and what is kept beside it of
    sequences that have left: bytes in memory and in files, and what they would be if none shared its
    beginning with another."""
    return serving.engine.call(_cache)


def _slots(scheduler: Scheduler) -> list[dict[str, Any]]:
    shown = []
    for slot in scheduler.slots:
        row: dict[str, Any] = {
            "id": slot.seq,
            "n_ctx": scheduler.n_ctx_seq,
            "speculative": False,
            "n_cached": len(slot.tokens),
            "is_processing": False,
        }
        if slot.job is not None:
            progress, request = slot.job.ticket.progress, slot.job.ticket.request
            row |= {
                "is_processing": True,
                "n_prompt_tokens": progress.prompt_tokens,
                "n_prompt_left": 0 if slot.has_read else len(slot.job.pending),
                "n_decoded": progress.completion_tokens,
                "n_limit": slot.job.writer.limit,
                "params": settings_of(
                    request.sampling,
                    scheduler.n_ctx_seq,
                    request.max_tokens,
                    request.stop,
                    ignore_eos=request.ignore_eos,
                    n_probs=request.logprobs or 0,
                ),
                "next_token": [
                    {
                        "has_next_token": True,
                        "n_remain": request.max_tokens - progress.completion_tokens
                        if request.max_tokens >= 0
                        else -1,
                        "n_decoded": progress.completion_tokens,
                    }
                ],
            }
        shown.append(row)
    return shown


def _cache(scheduler: Scheduler) -> dict[str, Any]:
    session = scheduler.session
    shown = session.kv_bytes() | {"n_ctx": session.n_ctx, "n_used": session.n_cells_used()}
    if read := session.rows_read():
        shown["rows_read"] = read
    store = scheduler.store
    if store is None:
        return shown
    kept = {"sequences": len(store), "ram": store.ram_used, "disk": store.disk_used}
    return shown | {"store": kept | {"unshared": store.unshared}}


def _model(serving: Serving) -> dict[str, Any]:
    meta = ("n_ctx", "n_ctx_train", "n_vocab", "n_embd", "n_params", "size")
    vocab = _VOCAB_TYPES.get(str(serving.model.metadata.get("tokenizer.ggml.model")), 0)
    return {
        "id": serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "latentkv",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "meta": {key: serving.about[key] for key in meta} | {"vocab_type": vocab},
    }


def _special(serving: Serving, token: int) -> str:
    return "" if token < 0 else serving.model.token_to_piece(token, True).decode("utf-8", errors="replace")


def _piece(serving: Serving, token: int) -> str | list[int]:
    piece = serving.model.token_to_piece(token, True)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
