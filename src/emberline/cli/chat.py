"""`emberline chat`: chats with a running server in the terminal.

If stdin is a pipe, its text is sent as one question, and the command exits after the answer."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from emberline.core.errors import EmberlineError, EngineFailed, EngineUnavailable, InvalidRequest, ModelNotFound

DEFAULT_URL = "http://127.0.0.1:8000"
SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "max_tokens", "seed")
HELP_TEXT = """\
/help            show this list
/reset           start a new conversation
/system [TEXT]   set the system prompt and start a new conversation; without TEXT, show it
/exit            exit (as does Ctrl-D); Ctrl-C stops an answer"""
# A model's output is not trusted: escape sequences could change the user's terminal.
CONTROL_CHARACTERS = dict.fromkeys(c for c in (*range(0x20), *range(0x7F, 0xA0)) if c not in (0x09, 0x0A))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="URL of the server.")
    parser.add_argument("--model", help="Model to chat with. (default: the first chat model that the server lists)")
    parser.add_argument("--system", default="", help="System prompt. (default: none)")
    parser.add_argument("--api-key", help="API key, sent as a bearer token. (default: none)")
    server_default = "(default: the server's)"
    parser.add_argument("--temperature", type=float, help=f"Sampling temperature; 0: greedy. {server_default}")
    parser.add_argument(
        "--top-p", type=float, help=f"Nucleus sampling: cumulative probability, 0 to 1. {server_default}"
    )
    parser.add_argument("--top-k", type=int, help=f"Number of most likely tokens to sample from. {server_default}")
    parser.add_argument("--max-tokens", type=int, help=f"Maximum tokens of an answer. {server_default}")
    parser.add_argument("--seed", type=int, help="Random seed of the sampling. (default: random)")


def run(args: argparse.Namespace) -> int:
    sampling = {name: value for name in SAMPLING_OPTIONS if (value := getattr(args, name)) is not None}
    endpoint = ChatServer(args.url, args.api_key)
    chat = ChatSession(
        endpoint, endpoint.choose_model(args.model), args.system, sampling, ChatTerminal(sys.stdout.isatty())
    )
    if sys.stdin.isatty():
        chat.run()
    elif question := sys.stdin.read().strip():
        chat.ask(question)
    return 0


class ChatServer:
    """A client of an OpenAI-compatible server that needs only the standard library."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(
                f"--url is {url!r}, which is not an http or https URL", param="url", hint=f"for example {DEFAULT_URL}"
            )
        self.url = url
        self._secure = parts.scheme == "https"
        self._host = parts.netloc.rpartition("@")[2]
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def choose_model(self, name: str | None) -> str:
        """Return `name`, or the server's first chat model if `name` is None.

        Raises ModelNotFound if an Emberline server does not list `name`. A gateway also accepts names of the form
        PROVIDER/MODEL that it does not list."""
        models = self._list_models(is_required=name is None)
        chat = [str(model["id"]) for model in models if model.get("kind", "chat") == "chat"]
        if name is None and not chat:
            raise ModelNotFound(f"the server at {self.url} has no chat model", hint="choose another server with --url")
        if name is None:
            return chat[0]
        is_emberline = bool(models) and all(model.get("owned_by") == "emberline" for model in models)
        if is_emberline and "/" not in name and name not in (str(model["id"]) for model in models):
            raise ModelNotFound(
                f"the server at {self.url} has no model {name!r}", hint=f"--model may be {', '.join(chat)}"
            )
        return name

    def _list_models(self, *, is_required: bool) -> list[dict[str, Any]]:
        """Return the models that the server lists.

        If the server answers with an error, raise it if `is_required`, else return []."""
        try:
            with self._request("GET", "/v1/models") as response:
                return list(json.load(response)["data"])
        except EngineUnavailable:
            raise
        except EmberlineError:
            if is_required:
                raise
            return []

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the JSON chunks of one streamed chat completion. Raises EngineFailed or EngineUnavailable.

        Closing the generator closes the connection, which cancels the request."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        with self._request("POST", "/v1/chat/completions", json.dumps(body)) as response:
            with contextlib.suppress(OSError, http.client.HTTPException):  # reported below as a lost connection
                while line := response.readline():
                    data = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or not data:
                        continue
                    if data == b"[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise EngineFailed(chunk["error"]["message"], hint="send the question again")
                    yield chunk
            raise EngineUnavailable(
                f"the connection to {self.url} was lost before the answer was complete",
                hint="the part that arrived is kept in the conversation",
            )

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        connect = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        with contextlib.closing(connect(self._host, timeout=600)) as connection:
            try:
                connection.request(method, self._base + path, body, self._headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                hint = "start one with `emberline serve`, or choose another with --url"
                raise EngineUnavailable(f"no server answers at {self.url}: {error}", hint=hint) from error
            if response.status != 200:
                raise _error_from_response(response)
            yield response


def _error_from_response(response: http.client.HTTPResponse) -> EmberlineError:
    try:
        message = str(json.load(response)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.reason
    wait = response.getheader("Retry-After")
    hints = {401: "add --api-key KEY", 429: f"retry in {wait} s" if wait else "retry in a few seconds"}
    return EmberlineError(f"the server answered {response.status}: {message}", hint=hints.get(response.status))


@dataclass(slots=True)
class ChatTerminal:
    """Prints answers. Control characters are removed if the output goes to a terminal, not to a pipe."""

    is_terminal: bool

    def write(self, text: str) -> None:
        sys.stdout.write(text.translate(CONTROL_CHARACTERS) if self.is_terminal else text)
        sys.stdout.flush()

    def write_dim(self, text: str, end: str = "\n") -> None:
        if self.is_terminal:
            sys.stdout.write(f"\x1b[2m{text.translate(CONTROL_CHARACTERS)}\x1b[0m{end}")
            sys.stdout.flush()


@dataclass(slots=True)
class ChatAnswer:
    """One answer that is being streamed, with its timing and token usage."""

    started_at: float
    text: str = ""
    chunk_count: int = 0
    first_chunk_at: float = 0.0
    last_chunk_at: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def count_chunk(self, now: float) -> None:
        self.chunk_count += 1
        self.last_chunk_at = now
        self.first_chunk_at = self.first_chunk_at or now

    def summary(self) -> str:
        if not self.chunk_count:
            return "no answer"
        tokens = self.usage.get("completion_tokens", self.chunk_count)
        about = "" if self.usage else "≈ "  # without the server's count, each chunk counts as one token
        parts = [f"TTFT {1000 * (self.first_chunk_at - self.started_at):.0f} ms"]
        if tokens > 1 and self.last_chunk_at > self.first_chunk_at:
            parts.append(f"{about}{(tokens - 1) / (self.last_chunk_at - self.first_chunk_at):.1f} tok/s")
        parts.append(f"{about}{tokens} tokens")
        if self.usage:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            parts.append(f"prompt {self.usage['prompt_tokens']} ({cached} cached)")
        return " · ".join(parts)


class ChatSession:
    def __init__(
        self, server: ChatServer, model: str, system: str, sampling: dict[str, Any], terminal: ChatTerminal
    ) -> None:
        self.server = server
        self.model = model
        self.system = system
        self.sampling = sampling
        self.terminal = terminal
        self.messages: list[dict[str, str]] = []

    def run(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        self.terminal.write_dim(f"{self.model} at {self.server.url}. Type /help for the commands, /exit to exit.")
        while True:
            try:
                line = input("\n> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                self.terminal.write_dim("\ntype /exit or Ctrl-D to exit")
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self.run_command(line)
            elif line:
                self.ask_and_print_errors(line)

    def run_command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            self.terminal.write_dim(HELP_TEXT)
        elif name == "/reset":
            self.messages.clear()
            self.terminal.write_dim("new conversation")
        elif name == "/system":
            if rest.strip():
                self.system = rest.strip()
                self.messages.clear()
            self.terminal.write_dim(f"system prompt: {self.system or 'none'}")
        else:
            self.terminal.write_dim(f"{name} is not a command; type /help for the list")

    def ask_and_print_errors(self, question: str) -> None:
        """Ask a question as `ask` does, but print an error instead of raising it."""
        try:
            self.ask(question)
        except KeyboardInterrupt:
            self.terminal.write_dim("stopped")
        except EmberlineError as error:
            self.terminal.write_dim(str(error))

    def ask(self, question: str) -> None:
        """Print the answer as it arrives, and add question and answer to the conversation.

        If the answer breaks off, the part that arrived is added. If no text arrived, nothing is added."""
        answer = ChatAnswer(time.monotonic())
        message = {"role": "user", "content": question}
        try:
            with contextlib.closing(self.server.stream(self.request_body(message))) as chunks:
                for chunk in chunks:
                    self.show_chunk(chunk, answer)
        finally:
            if answer.chunk_count:
                self.terminal.write("\n")
                self.terminal.write_dim(answer.summary())
            if answer.text:
                self.messages += [message, {"role": "assistant", "content": answer.text}]

    def request_body(self, message: dict[str, str]) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*system, *self.messages, message], **self.sampling}

    def show_chunk(self, chunk: dict[str, Any], answer: ChatAnswer) -> None:
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            if text := delta.get("content"):
                answer.text += text
                self.terminal.write(text)
            if reasoning := delta.get("reasoning_content"):
                self.terminal.write_dim(reasoning, end="")
            if text or reasoning:
                answer.count_chunk(time.monotonic())
