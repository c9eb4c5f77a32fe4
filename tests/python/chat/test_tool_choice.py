"""What tool_choice changes: which calls an answer may hold, and nothing of the prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from latentkv import Llama
from latentkv.chat.prompt import chat_request
from latentkv.chat.template import ChatTemplate
from latentkv.chat.tools import ToolUse

sys.path.insert(0, str(Path(__file__).parent))
from chat_templates import BARE_JSON, THINKING

ASK = [{"role": "user", "content": "Weather?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Looks.", "parameters": CITY}}


TOOLS = [tool("weather"), tool("time")]
NAMED = {"type": "function", "function": {"name": "time"}}


def allowed(mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}


@pytest.fixture(scope="module")
def demo_llm(plain_gguf: Path) -> Iterator[Any]:
    with Llama(str(plain_gguf), n_ctx=1024, n_threads=1, chat_format="chatml-function-calling") as llama:
        yield llama


@pytest.mark.parametrize("source", [THINKING, BARE_JSON, PLAIN], ids=["marked calls", "JSON", "no tools"])
@pytest.mark.parametrize("choice", ["none", "required", NAMED, allowed("auto"), allowed("required")])
def test_a_prompt_shows_all_tools_whatever_may_be_called(demo_llm: Any, source: str, choice: Any) -> None:
    """A server keeps what it computed of a prompt: turns of one conversation begin with the same tokens."""
    template = ChatTemplate(source, "<s>", "</s>")
    free, asked = (
        chat_request(demo_llm.model, template, ASK, ToolUse.of(TOOLS, each)) for each in ("auto", choice)
    )
    assert asked.tokens == free.tokens
    assert "weather" in asked.text
    assert "time" in asked.text


@pytest.mark.parametrize("choice", [NAMED, allowed("required")])
def test_only_an_allowed_tool_is_called(demo_llm: Any, choice: Any) -> None:
    for seed in range(3):
        answer = demo_llm.create_chat_completion(ASK, tools=TOOLS, tool_choice=choice, seed=seed)
        calls = answer["choices"][0]["message"]["tool_calls"]
        assert {call["function"]["name"] for call in calls} == {"time"}


def test_tools_that_may_not_be_called_leave_room_for_a_schema(demo_llm: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = demo_llm.create_chat_completion(ASK, tools=TOOLS, tool_choice="none", response_format=schema)
    assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Rome", "Oslo")
