"""A worker over HTTP whose scripted model holds a conversation with tool calls, for real clients.

    python tests/agent_server.py --port 8000 [--context 1000000] [--requests FILE]

Parsing, prompts, tool calls, streaming and HTTP are those of `emberline serve`; only the engine is scripted. To a user
message that contains RUN, the model answers with a call of a tool that runs a shell command (or of the only tool); to
the tool's result it answers with the result's text. `--requests` appends every request to a file, one JSON a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

from bytelevel import EOS
from scripted_engine import ScriptedEngine, WorkerHarness

from emberline.core.request import Submission
from emberline.net.server import HTTPServer
from emberline.server.listener import bind_listener
from emberline.tokens.template import ChatTemplate
from emberline.worker.engine_app import EngineApp
from emberline.worker.response_store import ResponseStore

# One line of messages and one of tools: the script reads the conversation from the prompt's own text.
TEMPLATE = "{{ messages | tojson }}\n{{ (tools or []) | tojson }}\n{{ '<think></think>' if false }}"
RUN = "Run echo"  # a user message with this text makes the model call a tool
_CALL = re.compile(RUN + r" by (\w+)")  # names the tool to call
MARKER = "tool-output-7291"  # the text that the called command prints
ANSWER = "The tool says: "
SHELL_TOOLS = ("Bash", "bash", "shell", "shell_command", "exec_command", "local_shell", "run_command")


class AgentEngine(ScriptedEngine):
    """Generates the tokens of the next message of the conversation in the prompt."""

    def _target_tokens(self, s: Submission, index: int) -> list[int]:
        messages, tools, *_ = self.tokenizer.decode(s.prompt, skip_special=False).split("\n")
        text = write_next_message(json.loads(messages), json.loads(tools))
        return [*self.tokenizer.encode(text, add_special=False), EOS]


def write_next_message(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """Return the model's raw output: the result of the last tool, a call in Hermes' format, or a greeting."""
    last = next(each for each in reversed(messages) if each["role"] != "system")
    if last["role"] == "tool":
        return f"{ANSWER}{MARKER if MARKER in last['content'] else last['content'][:200]}"
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if RUN not in str(last["content"]) or not functions:
        return "Hello there."
    wanted = _CALL.search(str(last["content"]))
    names = [wanted[1]] if wanted else [name for name in functions if name in SHELL_TOOLS] or [*functions]
    call = {"name": names[0], "arguments": make_arguments(functions[names[0]]["parameters"])}
    return f"I will run it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def make_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that match the schema of a tool that runs a command, with its required properties only."""
    properties = schema.get("properties", {})
    return {name: _make_value(name, properties.get(name, {})) for name in schema.get("required", [*properties][:1])}


def _make_value(name: str, schema: dict[str, Any]) -> Any:
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if name in ("command", "cmd"):
        return ["sh", "-c", f"echo {MARKER}"] if kind == "array" else f"echo {MARKER}"
    samples = {"array": [], "object": {}, "integer": 1, "number": 1, "boolean": False}
    return schema["enum"][0] if "enum" in schema else samples.get(kind, MARKER)


class AgentWorker:
    """The ASGI application of a worker with an AgentEngine. It can record every request."""

    def __init__(self, context: int, requests: Path | None) -> None:
        harness = WorkerHarness(lambda before, _: before)
        model = next(iter(harness.catalog))
        engine = AgentEngine(harness.tokenizer, harness.engine.script)
        builder = model.generator.prompt_builder
        builder.__init__(harness.tokenizer, ChatTemplate({"default": TEMPLATE}, {}), builder._style, context)
        model.generator.engine = engine  # type: ignore[assignment]  # it has the interface of AsyncEngine
        store = ResponseStore(None)
        self._app = EngineApp(harness.app._config, harness.app.engine, harness.catalog, None, {}, response_store=store)
        self._requests = requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._requests is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, status, reply_headers = b"", 0, dict[str, str]()

        async def receive_and_keep() -> Any:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            return message

        async def send_and_note(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            reply_headers.update((name.decode(), value.decode()) for name, value in message.get("headers", ()))
            await send(message)

        try:
            await self._app(scope, receive_and_keep, send_and_note)
        finally:
            query = scope.get("query_string", b"").decode()
            record = {
                "method": scope["method"],
                "path": scope["path"] + (f"?{query}" if query else ""),
                "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
                "body": body.decode(errors="replace"),
                "status": status,
                "reply_headers": reply_headers,
            }
            with self._requests.open("a") as file:
                file.write(json.dumps(record) + "\n")


async def serve(port: int, context: int, requests: Path | None) -> None:
    server, stop = HTTPServer(AgentWorker(context, requests)), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start(bind_listener("127.0.0.1", port))
    await stop.wait()
    await server.stop(5.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, default=1_000_000)
    parser.add_argument("--requests", type=Path)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.context, arguments.requests))


if __name__ == "__main__":
    main()
