"""Calls as newer models of Mistral write them: [TOOL_CALLS]name[ARGS]{…}, behind thoughts in [THINK]."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from latentkv.chat.template import ChatTemplate

sys.path.insert(0, str(Path(__file__).parent))
from chat_templates import MISTRAL_ARGS

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "time")]
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "Where?",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
        }
    ],
}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(MISTRAL_ARGS, bos_token="<s>", eos_token="</s>")


def test_a_call_goes_back_as_the_model_wrote_it(template: ChatTemplate) -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    rendered = template.apply([*ASKED, CALLED, result], tools=TOOLS).text
    assert rendered.startswith("<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][AVAILABLE_TOOLS][{")
    written = '[INST]Weather?[/INST][THINK]Where?[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Rome"}</s>'
    assert rendered.endswith(f"{written}[TOOL_RESULTS]sunny[/TOOL_RESULTS]")


@pytest.mark.parametrize(
    ("answer", "content", "thought", "calls"),
    [
        ("It is sunny.", "It is sunny.", None, []),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', None, None, ["weather"]),
        (
            '[THINK]Both.[/THINK]I look.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'
            '[TOOL_CALLS]time[ARGS]{"city": "Oslo"}',
            "I look.",
            "Both.",
            ["weather", "time"],
        ),
    ],
)
def test_what_the_model_writes_is_read(
    answer: str, content: str | None, thought: str | None, calls: list[str], template: ChatTemplate
) -> None:
    rendered = template.apply(ASKED, tools=TOOLS, parallel_tool_calls=True)
    assert {"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"} <= set(rendered.special)
    message = json.loads(rendered.parser.parse(answer, False))
    assert message["content"] == content
    assert message.get("reasoning_content") == thought
    found = message.get("tool_calls", [])
    assert [call["function"]["name"] for call in found] == calls
    assert all(json.loads(call["function"]["arguments"]) == {"city": "Oslo"} for call in found)


def test_json_answers_lose_their_fence(template: ChatTemplate) -> None:
    rendered = template.apply(ASKED, json_schema=CITY)
    assert (
        json.loads(rendered.parser.parse('```json{"city": "Rome"}```', False))["content"]
        == '{"city": "Rome"}'
    )
