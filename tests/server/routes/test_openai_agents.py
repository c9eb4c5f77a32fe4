"""The openai-agents package runs an agent whose tool is called, through both of OpenAI's interfaces."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("agents", reason="needs openai-agents (pip install '.[test]')")
STOPS = [".", " the", " of", " and", " to"]  # a small model goes on for ever; none of them is in a call


@pytest.mark.parametrize("interface", ["responses", "chat"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["calling", "server"])  # a template that takes tools, and one that does not
def test_an_agent_calls_its_tool(
    where: str, interface: str, stream: bool, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue(where)
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    called: list[str] = []

    @function_tool
    def now() -> str:
        """The time."""
        called.append("now")
        return "Noon."

    async def run() -> Any:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            kinds = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
            settings = ModelSettings(tool_choice="now", parallel_tool_calls=False, extra_body={"stop": STOPS})
            agent: Any = Agent(
                name="clerk",
                instructions="Answer briefly.",
                model=kinds[interface](model="demo", openai_client=client),
                model_settings=settings,
                tools=[now],
            )
            if not stream:
                return await Runner.run(agent, "What time is it?", max_turns=3)
            result = Runner.run_streamed(agent, "What time is it?", max_turns=3)
            async for _ in result.stream_events():
                pass
            return result

    result = asyncio.run(run())
    kinds = [type(item).__name__ for item in result.new_items]
    assert kinds[:2] == ["ToolCallItem", "ToolCallOutputItem"]  # then the model may do as it likes
    assert len(called) == kinds.count("ToolCallItem") == kinds.count("ToolCallOutputItem")
    assert isinstance(result.final_output, str)
    assert result.context_wrapper.usage.requests >= 2
