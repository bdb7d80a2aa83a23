"""Requests of Claude Code, Codex, opencode and others, as recorded, against the engine's HTTP server and the gateway.

`scripts/test-clients` runs the clients themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from agent_server import ANSWER, MARKER, AgentWorker
from anthropic.types import Message, RawMessageStreamEvent
from local_gateway import Loop
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from recorded_clients import list_recordings, read_recording

from emberline.core.gateway_config import GatewayConfig
from emberline.gateway.http.main import build_gateway
from emberline.net.server import HTTPServer
from emberline.server.listener import bind_listener

TRANSLATED = "translated"  # a model of a provider that has only chat completions
CASES = [(client, i) for client in list_recordings() for i in range(len(read_recording(client)))]


@dataclass
class Reply:
    """What an SDK read from a reply."""

    text: str = ""
    calls: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URLs of an engine's HTTP server and of a gateway in front of it."""
    home, loop = tmp_path_factory.mktemp("gateway"), Loop()

    async def start() -> tuple[list[HTTPServer], AsyncExitStack, dict[str, str]]:
        stack, found = AsyncExitStack(), {}
        servers = []
        for name in ("engine", "gateway"):
            listener = bind_listener("127.0.0.1", 0)
            found[name] = f"http://127.0.0.1:{listener.getsockname()[1]}"
            app = AgentWorker(1_000_000, None) if name == "engine" else await make_gateway(home, found["engine"], stack)
            servers.append(HTTPServer(app))
            await servers[-1].start(listener)
        return servers, stack, found

    async def stop() -> None:
        for server in reversed(servers):
            await server.stop(10.0)
        await stack.aclose()

    servers, stack, found = loop.run(start())
    yield found
    loop.run(stop())
    loop.close()


async def make_gateway(home: Path, engine: str, stack: AsyncExitStack) -> Any:
    config = GatewayConfig(
        store=f"sqlite:{home / 'store'}",
        master_key=str(home / "master"),
        api_keys=("a-key-of-the-tests",),
        engine=engine,
    )
    default = {"models": {TRANSLATED: "ollama/m"}, "providers": {"ollama": {"base_url": engine}}}
    return await build_gateway(config, {"gateways": {"default": default}}, stack)


@pytest.mark.parametrize("target", ["engine", "gateway", TRANSLATED])
@pytest.mark.parametrize(("client", "number"), CASES)
def test_recorded_request_is_answered(urls: dict[str, str], client: str, number: int, target: str) -> None:
    recorded = read_recording(client)[number]
    body = replace_references(recorded["body"])
    if target == TRANSLATED:
        body = {**body, "model": TRANSLATED}
    url = urls["engine" if target == "engine" else "gateway"]
    if body.get("thread", {}).get("type") == "continue":
        with pytest.raises(anthropic.NotFoundError, match="thread_not_found"):
            send(url, recorded["path"], body, recorded["headers"])
        return
    reply, ignored = send(url, recorded["path"], body, recorded["headers"])
    if target == "engine":
        assert ignored == recorded["ignored"]
    if answers_tool(body):
        assert reply == Reply(ANSWER + MARKER)
    elif body.get("tools"):
        assert len(reply.calls) == 1 and reply.text == "I will run it.\n"
    else:
        assert reply.text and not reply.calls


def replace_references(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with calls in place of references to the items of a reply that this server never sent."""
    if not isinstance(body.get("input"), list):
        return body
    items: list[Any] = []
    for item, following in zip(body["input"], [*body["input"][1:], {}], strict=True):
        if item.get("type") != "item_reference":
            items.append(item)
        elif "call_id" in following:
            items.append({"type": "function_call", "name": "f", "arguments": "{}", "call_id": following["call_id"]})
    return {**body, "input": items}


def answers_tool(body: dict[str, Any]) -> bool:
    """Return whether the last message, except those of the system, is the result of a tool."""
    messages = body.get("messages") or body["input"]
    last = next(each for each in reversed(messages) if each.get("role") != "system")
    content = last.get("content")
    blocks = content if isinstance(content, list) else []
    is_block = any(block.get("type") == "tool_result" for block in blocks)
    return last.get("role") == "tool" or last.get("type") == "function_call_output" or is_block


def send(url: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[Reply, str]:
    """Send the request by its vendor's SDK. Returns the reply, and the fields that the server ignored."""
    options = {"headers": headers}
    seen: list[str] = []
    if "/messages" in path:
        client = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)
        kinds: Any = (Message, anthropic.Stream[RawMessageStreamEvent])
    else:
        client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)  # type: ignore[assignment]
        is_chat = "/chat/" in path
        kinds = (
            (ChatCompletion, openai.Stream[ChatCompletionChunk])
            if is_chat
            else (Response, openai.Stream[ResponseStreamEvent])
        )
    client._client.event_hooks["response"].append(
        lambda response: seen.append(response.headers.get("x-emberline-ignored", ""))
    )
    with client:
        if not body.get("stream"):
            return read_whole(client.post(path, body=body, cast_to=kinds[0], options=options)), seen[-1]
        stream = client.post(path, body=body, cast_to=kinds[0], options=options, stream=True, stream_cls=kinds[1])
        return read_stream(stream), seen[-1]


def read_whole(reply: Any) -> Reply:
    match reply:
        case Message():
            texts = [block.text for block in reply.content if block.type == "text"]
            return Reply("".join(texts), [block.name for block in reply.content if block.type == "tool_use"])
        case ChatCompletion():
            message = reply.choices[0].message
            return Reply(message.content or "", [call.function.name for call in message.tool_calls or ()])
    return Reply(reply.output_text, [item.name for item in reply.output if item.type == "function_call"])


def read_stream(stream: Any) -> Reply:
    reply = Reply()
    for event in stream:
        if isinstance(event, ChatCompletionChunk):
            for choice in event.choices:
                reply.text += choice.delta.content or ""
                calls = choice.delta.tool_calls or ()
                reply.calls += [call.function.name for call in calls if call.function and call.function.name]
        elif event.type == "content_block_start" and event.content_block.type == "tool_use":
            reply.calls.append(event.content_block.name)
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            reply.text += event.delta.text
        elif event.type == "response.completed":
            return read_whole(event.response)
    return reply
