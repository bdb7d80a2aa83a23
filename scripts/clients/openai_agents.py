"""A conversation of OpenAI's agents package with a tool and a hosted tool. Arguments: URL, MODEL, responses or chat."""

import asyncio
import os
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    WebSearchTool,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def bash(command: str) -> str:
    """Run a command."""
    return command.replace("echo ", "")


async def main() -> None:
    url, model, kind = sys.argv[1:]
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=os.environ["EMBERLINE_API_KEY"])
    is_responses = kind == "responses"
    wrapped = (OpenAIResponsesModel if is_responses else OpenAIChatCompletionsModel)(model, client)
    agent = Agent("agent", instructions="Help.", model=wrapped, tools=[bash, *([WebSearchTool()] * is_responses)])
    first = await Runner.run(agent, "Run echo please")
    print(first.final_output)
    second = Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": "Run echo again"}])
    async for _ in second.stream_events():
        pass
    print(second.final_output)


asyncio.run(main())
