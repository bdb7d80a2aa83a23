"""Endpoint: one thing that can be asked of the management API. The OpenAPI document is made from these."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.ask import Ask

Handle = Callable[[Ask], Awaitable[Any]]


@dataclass(frozen=True)
class Endpoint:
    method: str
    path: str  # {name}: one part of it; {name*}: all that is left
    summary: str
    handle: Handle
    request: Any = None  # the type of its body
    reply: Any = None  # None: any JSON
    query: tuple[str, ...] = ()  # all that may be asked
    status: int = 200
    cloudflare: bool = False  # in Cloudflare's envelope
    lines: bool = False  # answers with JSON lines: see Admin.export

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        text = re.escape(self.path).replace(r"\{", "{").replace(r"\}", "}").replace(r"\*", "*")
        text = re.sub(r"\{(\w+)\*\}", r"(?P<\1>.+)", text)
        return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", text))

    def match(self, path: str) -> dict[str, str] | None:
        """The parts of a path, as it is on the wire; None: it is not this one's."""
        found = self._pattern.fullmatch(path)
        if found is None:
            return None
        try:
            return {name: unquote(part, errors="strict") for name, part in found.groupdict().items()}
        except UnicodeDecodeError as e:
            raise InvalidRequest("the path is not UTF-8") from e

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"\{(\w+)\*?\}", self.path)
