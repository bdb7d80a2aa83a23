"""open_store: opens the gateway's store for a URL."""

from __future__ import annotations

from pathlib import Path

from emberline.core.clock import Clock
from emberline.core.errors import InvalidRequest
from emberline.gateway.store.base import GatewayStore


async def open_store(url: str, clock: Clock | None = None) -> GatewayStore:
    """Open the store at `sqlite:DIRECTORY` or `postgresql://...`. Raise InvalidRequest for any other URL."""
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite" and rest:
        from emberline.gateway.store.sqlite import SQLiteStore

        return await SQLiteStore.open(Path(rest.removeprefix("//")).expanduser(), clock)
    if scheme in ("postgresql", "postgres"):
        from emberline.gateway.store.postgres import PostgresStore

        return await PostgresStore.open(url, clock)
    raise InvalidRequest(
        f"the store URL has an unknown scheme or no directory: scheme {scheme[:40]!r}",
        param="store",
        hint="use sqlite:DIRECTORY or postgresql://USER@HOST/DATABASE",
    )
