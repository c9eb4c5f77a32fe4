"""POST /v1/embeddings, OpenAI's, and /embedding and /embeddings, llama.cpp's."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from numpy.typing import NDArray
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from latentkv.engine.request import Progress, Request
from latentkv.errors import expected
from latentkv.server.answering import Answering, Inbox, unless_gone
from latentkv.server.body import Route
from latentkv.server.fields import Ignored
from latentkv.server.llama_cpp.prompts import mixed_tokens, prompts_of
from latentkv.server.schemas import Body
from latentkv.server.serving import Serving, serving_of
from latentkv.session.pool import normalized
from latentkv.session.pooling import NORMS, chosen

MAX_INPUTS = 2048  # as OpenAI's

router = APIRouter(route_class=Route)
Served = Annotated[Serving, Depends(serving_of)]


class EmbeddingBody(Body, Ignored):
    """`content` is llama.cpp's name for the input, and asks for an answer in its shape."""

    model: str | None = None
    input: Any = None
    content: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    embd_normalize: Annotated[int, Field(ge=NORMS.low, le=NORMS.high)] | None = None

    def inputs(self) -> list[Any]:
        """Each a text or a list of token ids and texts."""
        if self.input is not None and self.content is not None:
            raise expected("content", "input or content", "both")
        name = "content" if self.input is None and self.content is not None else "input"
        found = prompts_of(getattr(self, name), name)
        if len(found) > MAX_INPUTS:
            raise expected(name, f"at most {MAX_INPUTS} of them", len(found))
        return found

    def check_dimensions(self, n_embd: int) -> None:
        if self.dimensions not in (None, n_embd):
            hint = "leave it out, and cut the vectors yourself if the model was trained for that"
            raise expected("dimensions", f"{n_embd}, the model's", self.dimensions, hint)


@router.post("/v1/embeddings")
async def openai_embeddings(body: EmbeddingBody, http: HttpRequest, serving: Served) -> JSONResponse:
    if body.input is None and body.content is not None:
        return await embeddings(body, http, serving)
    pooling = chosen(serving.pooling, serving.model.metadata, "mean")
    if pooling == "none":
        said = "none, which makes a vector for every token"
        raise expected("pooling", "mean, cls or last", said, "start the server with --pooling mean")
    progress, vectors = await _embedded(body, pooling, http, serving)

    def told() -> JSONResponse:
        counted = sum(each.prompt_tokens for each in progress)
        data = [_item(index, rows[0], body.encoding_format) for index, rows in enumerate(vectors)]
        usage = {"prompt_tokens": counted, "total_tokens": counted}
        return JSONResponse({"object": "list", "data": data, "model": serving.name, "usage": usage})

    return await run_in_threadpool(told)


@router.post("/embedding")
@router.post("/embeddings", include_in_schema=False)
async def embeddings(body: EmbeddingBody, http: HttpRequest, serving: Served) -> JSONResponse:
    """llama.cpp's shape: rows for each input, one where it is pooled and as many as tokens where not."""
    pooling = chosen(serving.pooling, serving.model.metadata)
    _, vectors = await _embedded(body, pooling, http, serving)

    def told() -> JSONResponse:
        rows = enumerate(vectors)
        return JSONResponse([{"index": index, "embedding": each.tolist()} for index, each in rows])

    return await run_in_threadpool(told)


async def _embedded(
    body: EmbeddingBody, pooling: str, http: HttpRequest, serving: Serving
) -> tuple[list[Progress], list[NDArray[np.float32]]]:
    """What the engine did of each input, and its vectors; those of single tokens are not normalized."""
    serving.check_model(body.model)
    body.check_dimensions(serving.model.n_embd)
    norm = serving.embd_normalize if body.embd_normalize is None else body.embd_normalize
    requests = await run_in_threadpool(_asked, body, pooling, serving)
    found = await unless_gone(http, _answered(requests, serving))
    vectors = [progress.embedding for progress in found if progress.embedding is not None]
    if pooling == "none":
        return found, vectors
    return found, await run_in_threadpool(lambda: [normalized(rows, norm) for rows in vectors])


def _asked(body: EmbeddingBody, pooling: str, serving: Serving) -> list[Request]:
    requests = []
    for given in body.inputs():
        tokens = mixed_tokens(serving, given, True, True, "input")
        if not tokens:
            raise expected("input", "texts of at least one token", "an empty one")
        requests.append(Request(tokens, serving.sampling, max_tokens=0, reuses=False, pooling=pooling))
        serving.scheduler.check_length(len(tokens))
    return requests


async def _answered(requests: Sequence[Request], serving: Serving) -> list[Progress]:
    """As many at once as there are sequences: what others ask meanwhile comes between. The first error ends
    all."""
    inbox, running = Inbox(), dict[int, Answering]()
    found: list[Progress] = []
    n_left = len(requests)
    try:
        while n_left:
            while len(found) < len(requests) and len(running) < len(serving.scheduler.slots):
                index = len(found)
                running[index] = Answering(serving.engine, requests[index], inbox, index)
                found.append(running[index].ticket.progress)
            for index, piece in await inbox.take():
                if piece is None:
                    raise running[index].error
                del running[index]
                n_left -= 1
        return found
    finally:
        for answering in running.values():
            answering.cancel()


def _item(index: int, vector: NDArray[np.float32], encoding: str) -> dict[str, Any]:
    if encoding == "float":
        return {"object": "embedding", "index": index, "embedding": vector.tolist()}
    coded = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return {"object": "embedding", "index": index, "embedding": coded, "encoding_format": "base64"}
