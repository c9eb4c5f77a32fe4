"""Builds the application from its routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from latentkv.server import chat, completions, embeddings, errors, metrics, page, refused
from latentkv.server.access.guard import Guard
from latentkv.server.llama_cpp import completion, properties
from latentkv.server.messages import routes as messages
from latentkv.server.responses import routes as responses
from latentkv.server.serving import Serving

MAX_BYTES = 16 << 20  # largest body: about three million tokens of text


def create_app(
    serving: Serving,
    *,
    api_keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    hosts: Sequence[str] = ("*",),
    max_bytes: int = MAX_BYTES,
    with_page: bool = True,
) -> FastAPI:
    """api_keys: every request except /health and the page must bring one of them. origins: other pages that
    may call ("*": all). hosts: names under which requests may reach the server ("*": any). When the app ends,
    the engine ends."""
    from latentkv.version import version

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(app.state.serving.close)  # a signal may end the process right after
        del app.state.serving  # the app is part of circles, which would keep the model open

    app = FastAPI(
        title="latentkv",
        version=version(),
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
        lifespan=life,
    )
    app.state.serving = serving
    errors.install(app)
    routers = [chat.router, completions.router, responses.router, messages.router]
    routers += [embeddings.router, completion.router, properties.router, metrics.router, refused.router]
    for router in routers + ([page.router] if with_page else []):
        app.include_router(router)
    app.add_middleware(Guard, keys=api_keys, max_bytes=max_bytes, origins=origins, hosts=hosts)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app
