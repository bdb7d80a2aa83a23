"""A real gateway in a thread of the test process, with HTTP, fake providers and a real store."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from emberline.core.gateway_config import GatewayConfig
from emberline.gateway.core.log_record import LogPayload, LogRecord
from emberline.gateway.fakes.provider import FakeProvider
from emberline.gateway.http.main import build_gateway
from emberline.gateway.store.filters import LogFilters
from emberline.net.server import HTTPServer
from emberline.server.listener import bind_listener

T = TypeVar("T")
TIMEOUTS = {
    "connect": 10.0,
    "first_byte": 10.0,
    "between_events": 10.0,
    "total": 30.0,
}
HASTY = {**TIMEOUTS, "first_byte": 1.2, "between_events": 1.2}  # for tests of timeouts


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


class LocalGateway:
    """A running gateway with fake providers.

    `settings` are those of the default gateway, `process` those of the process. `providers` returns the settings of all
    providers for the URLs of the fakes. Without a configuration file, all these settings are left out.
    """

    def __init__(
        self,
        home: Path,
        fakes: Sequence[str],
        providers: Callable[[dict[str, str]], dict[str, Any]],
        process: dict[str, Any] | None = None,
        *,
        has_config_file: bool = True,
        **settings: Any,
    ) -> None:
        self._process = process or {}
        self._loop = Loop()
        self.home = home
        self.fakes = {name: self._loop.run(_start_fake()) for name in fakes}
        tables = providers({name: fake.url for name, fake in self.fakes.items()})
        default = {"timeouts": TIMEOUTS, "retries": {"attempts": 2, "delay": 0.01}, "providers": tables}
        self._config_file = {"gateways": {"default": {**default, **settings}}} if has_config_file else {}
        self._loop.run(self._start())

    async def _start(self) -> None:
        self._stack = AsyncExitStack()
        config = GatewayConfig(
            store=f"sqlite:{self.home / 'store'}",
            master_key=str(self.home / "master"),
            api_keys=("a-key-of-the-tests",),
            engine="http://127.0.0.1:1",  # an unused port
            **self._process,
        )
        self.app = app = await build_gateway(config, self._config_file, self._stack)
        self._store = app.store
        listener = bind_listener("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = HTTPServer(app, max_message_bytes=1 << 20)
        await self._server.start(listener)

    def __enter__(self) -> LocalGateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        async def stop() -> None:
            await self._server.stop(10.0)
            await self._stack.aclose()
            for fake in self.fakes.values():
                await fake.close()

        self._loop.run(stop())
        self._loop.close()

    def reset(self) -> None:
        for fake in self.fakes.values():
            fake.fault, fake.script, fake.fault_after, fake.pace = "", [], 3, 0.0
            fake.requests, fake.count, fake.gone, fake.text, fake.always_sends_usage = [], 0, 0, "", False

    def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None, method: str = "POST"
    ) -> tuple[int, dict[str, str], bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json", **(headers or {})}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read()
        except urllib.error.HTTPError as e:
            return e.code, {k.lower(): v for k, v in e.headers.items()}, e.read()

    def record(self, id: str) -> LogRecord:
        """Return the log record, waiting until it is written."""
        deadline = time.monotonic() + 10
        while (found := self._loop.run(self._find(id))) is None:
            assert time.monotonic() < deadline, f"no record {id}"
            time.sleep(0.02)
        self._loop.run(self._store._writer.run(lambda thread: None))  # the payload is written after the record
        return found

    async def _find(self, id: str) -> LogRecord | None:
        return await self._store.get_record("default", "default", id)

    def has_no_record(self, id: str) -> bool:
        """Return whether the record is missing although later ones are written."""
        return self._loop.run(self._find(id)) is None

    def payload(self, id: str) -> LogPayload | None:
        return self._loop.run(self._store.get_payload("default", "default", id))

    def append(self, records: Sequence[LogRecord]) -> None:
        """Append records to the store directly."""
        self._loop.run(self._store.append_records([(record, None) for record in records]))

    def newest(self) -> LogRecord | None:
        """Return the last record written."""

        async def read() -> list[LogRecord]:
            return (await self._store.read_page(LogFilters(account="default", gateway="default"), limit=1)).records

        found = self._loop.run(read())
        return found[0] if found else None


async def _start_fake() -> FakeProvider:
    return await FakeProvider().start()
