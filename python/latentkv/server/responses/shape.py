"""An answer as OpenAI's Response: an object, or the events that build it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from latentkv.engine.request import Progress
from latentkv.generate.writer import Piece
from latentkv.sampling.logprobs import TokenScore, chat_shape
from latentkv.server import errors
from latentkv.server.blocks import Block, Blocks, Change
from latentkv.server.events import named
from latentkv.server.responses.body import ResponsesBody
from latentkv.server.serving import Serving

Event = dict[str, Any]
_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}
_GROWS = ("function", "custom")  # calls whose item begins without their arguments


class Beginning:
    """A response that has begun, and may fail. Events are numbered in the order in which they are
    requested."""

    def __init__(self, body: ResponsesBody, serving: Serving) -> None:
        self._head = _head(body, serving)
        self._number = 0

    def first(self) -> list[Event]:
        begun = self._response("in_progress")
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def failed(self, error: errors.Refused) -> list[str]:
        code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
        failure = {"error": {"code": code, "message": errors.shown(error.message)}}
        return [named(self._event("response.failed", response=self._response("failed") | failure))]

    def _response(self, status: str) -> dict[str, Any]:
        return self._head | {"status": status}

    def _event(self, kind: str, **values: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}


class ResponseShape(Beginning):
    """One answer."""

    def __init__(
        self,
        body: ResponsesBody,
        serving: Serving,
        blocks: Blocks,
        progress: Progress,
        keep: Callable[[dict[str, Any]], None] = lambda response: None,
    ) -> None:
        """keep takes the whole response, at its end."""
        super().__init__(body, serving)
        self._keep = keep
        self._serving, self._blocks, self._progress = serving, blocks, progress
        self._with_logprobs = body.with_logprobs
        self._tools = body.offered
        self._ids: dict[int, str] = {}

    def lines(self, piece: Piece) -> list[str]:
        return [named(event) for event in self.events(piece)]

    def events(self, piece: Piece) -> Iterator[Event]:
        for change in self._changes(piece):
            yield from self._changed(change)
        if piece.finish_reason is not None:
            response = self._ended(piece.finish_reason)
            yield self._event(f"response.{response['status']}", response=response)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        reason = pieces[-1].finish_reason or "stop"
        text = "".join(piece.text for piece in pieces)
        tokens = tuple(token for piece in pieces for token in piece.tokens)
        for _ in self._changes(Piece(text, tokens, reason)):
            pass
        return self._ended(reason)

    def _changes(self, piece: Piece) -> Iterator[Change]:
        yield from self._blocks.push(piece)
        if piece.finish_reason is not None and all(block.kind == "reasoning" for block in self._blocks.all):
            yield from self._blocks.open_text()

    def _ended(self, reason: str) -> dict[str, Any]:
        is_cut = reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        thought = "".join(block.text for block in self._blocks.all if block.kind == "reasoning")
        response |= {
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(block, _status(block)) for block in self._blocks.all],
            "usage": _usage(self._progress, len(self._serving.model.tokenize(thought.encode(), False, True))),
        }
        self._keep(response)
        return response

    def _changed(self, change: Change) -> Iterator[Event]:
        block = change.block
        at = {"item_id": self._id(block), "output_index": block.index}
        part = at | {"content_index": 0}
        if change.what == "opened":
            if block.kind != "call" or self._tools.called(block.name).kind in _GROWS:
                yield self._added(block)
            if block.kind != "call":
                yield self._event("response.content_part.added", **part, part=self._part(block))
        elif change.what == "grew":
            if block.kind == "call":
                if self._tools.called(block.name).kind == "function":
                    yield self._event("response.function_call_arguments.delta", **at, delta=change.text)
            elif block.kind == "reasoning":
                yield self._event("response.reasoning_text.delta", **part, delta=change.text)
            else:
                scores = self._scores(change.tokens)
                yield self._event("response.output_text.delta", **part, delta=change.text, logprobs=scores)
        else:
            yield from self._closed(block, at, part)

    def _closed(self, block: Block, at: Event, part: Event) -> Iterator[Event]:
        if block.kind == "call":
            yield from self._called(block, at)
        elif block.kind == "reasoning":
            yield self._event("response.reasoning_text.done", **part, text=block.text)
        else:
            scores = self._scores(block.tokens)
            yield self._event("response.output_text.done", **part, text=block.text, logprobs=scores)
        if block.kind != "call":
            yield self._event("response.content_part.done", **part, part=self._part(block))
        item = self._item(block, _status(block))
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _added(self, block: Block) -> Event:
        item = self._item(block, "in_progress")
        return self._event("response.output_item.added", output_index=block.index, item=item)

    def _called(self, block: Block, at: Event) -> Iterator[Event]:
        """The arguments of a call. Those of a custom tool come in one piece: they are text within JSON."""
        called = self._tools.called(block.name)
        if called.kind == "function":
            done = at | {"name": called.name, "arguments": block.text}
            yield self._event("response.function_call_arguments.done", **done)
        elif called.kind == "custom":
            text = called.input(block.text)
            yield self._event("response.custom_tool_call_input.delta", **at, delta=text)
            yield self._event("response.custom_tool_call_input.done", **at, input=text)
        else:
            yield self._added(block)

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        parts = [] if status == "in_progress" else [self._part(block)]
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": parts}
        if block.kind == "text":
            return item | {"type": "message", "role": "assistant", "content": parts}
        return item | self._tools.called(block.name).item(block.call_id, block.text)

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        scores = self._scores(block.tokens)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": scores}

    def _scores(self, tokens: Sequence[TokenScore]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = chat_shape(tokens)["content"] if self._with_logprobs else []
        return found

    def _id(self, block: Block) -> str:
        return self._ids.setdefault(block.index, f"{_PREFIX[block.kind]}_{uuid.uuid4().hex}")


def _status(block: Block) -> str:
    """The status. A call whose arguments were cut by a stop string is incomplete."""
    if block.kind == "call" and not block.is_cut:
        try:
            json.loads(block.text)
        except ValueError:
            return "incomplete"
    return "incomplete" if block.is_cut else "completed"


def _head(body: ResponsesBody, serving: Serving) -> dict[str, Any]:
    """The fields in which a response repeats its request."""
    sampling = serving.sampling
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": serving.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False and serving.responses.keeps,
        "temperature": sampling.temperature if body.temperature is None else body.temperature,
        "text": {"format": body.text.format or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.offered.shown,  # without those that were left out
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _usage(progress: Progress, n_thought: int) -> dict[str, Any]:
    """n_thought: tokens of the reasoning text."""
    return {
        "input_tokens": progress.prompt_tokens,
        "input_tokens_details": {"cached_tokens": progress.timings.cached_n, "cache_write_tokens": 0},
        "output_tokens": progress.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": min(n_thought, progress.completion_tokens)},
        "total_tokens": progress.prompt_tokens + progress.completion_tokens,
    }
