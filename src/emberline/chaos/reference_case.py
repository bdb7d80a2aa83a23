"""ReferenceCase: a request and its known answer. ReferenceCases: creates such requests and stores them.

A reference server, into which no faults are injected, gives the known answer before the run."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from emberline.chaos.observed_reply import ObservedReply
from emberline.net.connection_pool import FetchedReply, HTTPConnectionPool

WORDS = """ember line river stone cloud table green silent winter orange seven letter window copper music paper garden
night engine bridge yellow market number forest mirror summer candle harbor"""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["red", "green", "blue"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TOOL = {"name": "paint", "description": "Paints a wall.", "parameters": SCHEMA}
LONG_PROMPT_BLOCKS, SHORT_PROMPT_BLOCKS = 22.0, 2.0
OUTPUT_TOKEN_RANGE = (20, 60)


@dataclass(frozen=True, slots=True)
class ReferenceCase:
    path: str
    body: dict[str, Any]
    has_long_prompt: bool  # long enough for a prefill worker
    expected: ObservedReply

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    def encode_with_request_marker(self, marker: str) -> bytes:
        """Return the request's JSON body with `marker` as its first field, the user's id.

        Proxies recognize the request by the marker. The user's id does not affect the reply."""
        mark = {"metadata": {"user_id": marker}} if self.path == "/v1/messages" else {"user": marker}
        return json.dumps({**mark, **self.body}).encode()


class ReferenceCases:
    def __init__(self, url: str, model: str, rng: random.Random) -> None:
        self._url = url  # of the reference server
        self._model = model
        self._rng = rng
        self._characters_per_token = 4.0
        self._count = 0
        self.cases: list[ReferenceCase] = []

    async def measure_token_length(self, pool: HTTPConnectionPool) -> None:
        """Measure the mean number of characters per token, to write prompts with a given number of tokens."""
        text = self._draw_random_text(2000)
        reply = await self._post(pool, "/tokenize", {"model": self._model, "prompt": text})
        self._characters_per_token = len(text) / int(json.loads(reply.body)["count"])

    async def create_case(self, pool: HTTPConnectionPool, *, is_long: bool, is_stream: bool) -> ReferenceCase:
        while True:
            path, body = self._draw_path_and_body(is_long, is_stream)
            reply = await self._post(pool, path, body)
            raw = reply.body
            expected = (
                ObservedReply.from_stream(path, raw)
                if is_stream and reply.status == 200
                else ObservedReply.from_body(reply.status, raw)
            )
            if expected.is_complete and not expected.flaw:
                self.cases.append(ReferenceCase(path, body, is_long, expected))
                return self.cases[-1]
            if reply.status not in (400, 404):  # 400, 404: this model does not support the request, another is drawn
                raise RuntimeError(f"the reference server answered with HTTP status {reply.status}: {raw[:300]!r}")

    async def _post(self, pool: HTTPConnectionPool, path: str, body: dict[str, Any]) -> FetchedReply:
        headers = {"content-type": "application/json"}
        return await pool.fetch("POST", self._url + path, headers, json.dumps(body).encode())

    def pick_case(self) -> ReferenceCase:
        return self._rng.choice(self.cases)

    def _draw_path_and_body(self, is_long: bool, is_stream: bool) -> tuple[str, dict[str, Any]]:
        dice = self._rng
        self._count += 1
        tokens = 16 * (LONG_PROMPT_BLOCKS if is_long else SHORT_PROMPT_BLOCKS) * dice.uniform(0.8, 1.2)
        text = f"{self._count}. {self._draw_random_text(int(tokens * self._characters_per_token))}"
        path = dice.choice(("/v1/completions", "/v1/completions", "/v1/chat/completions", "/v1/messages"))
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": dice.randint(*OUTPUT_TOKEN_RANGE),
            "stream": is_stream,
        }
        body |= dice.choice(({"temperature": 0.0}, {"temperature": 0.9, "seed": dice.getrandbits(32)}))
        if path == "/v1/messages":
            body.pop("seed", None)
            return path, body | {"temperature": 0.0, "messages": [{"role": "user", "content": text}]}
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        body["ignore_eos"] = True
        if dice.random() < 0.25:
            body |= {"frequency_penalty": 0.4, "presence_penalty": 0.2}
        if path == "/v1/completions":
            return path, body | {"prompt": text} | ({"logprobs": 1} if dice.random() < 0.2 else {})
        return path, body | {"messages": [{"role": "user", "content": text}]} | self._draw_output_format()

    def _draw_output_format(self) -> dict[str, Any]:
        """Return the request fields for a random output format: a JSON schema, a tool, or {} for plain text."""
        kind = self._rng.random()
        if kind < 0.25:
            shape = {"type": "json_schema", "json_schema": {"name": "wall", "schema": SCHEMA, "strict": True}}
            return {"response_format": shape, "ignore_eos": False}
        if kind < 0.4:
            required = {"type": "function", "function": {"name": "paint"}}
            return {"tools": [{"type": "function", "function": TOOL}], "tool_choice": required, "ignore_eos": False}
        return {}

    def _draw_random_text(self, token_count: int) -> str:
        vocabulary, words = WORDS.split(), list[str]()
        while token_count > 0:
            words.append(self._rng.choice(vocabulary))
            token_count -= len(words[-1]) + 1
        return " ".join(words)
