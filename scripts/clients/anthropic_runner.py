"""A conversation of Anthropic's tool runner for Python. Arguments: URL, MODEL."""

import os
import sys

from anthropic import Anthropic, beta_tool


@beta_tool
def bash(command: str) -> str:
    """Run a command.

    Args:
        command: the command
    """
    return command.replace("echo ", "")


client = Anthropic(base_url=sys.argv[1], api_key=os.environ["EMBERLINE_API_KEY"])
messages = [{"role": "user", "content": "Run echo please"}]
for stream in (False, True):
    runner = client.beta.messages.tool_runner(
        model=sys.argv[2], max_tokens=1000, messages=messages, tools=[bash], stream=stream
    )
    reply = runner.until_done()
    print("".join(block.text for block in reply.content if block.type == "text"))
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "Run echo again"}]
