"""AdminEndpoint: one method and path of the management API.

The OpenAPI document is generated from all endpoints.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.admin_request import AdminRequest

EndpointHandler = Callable[[AdminRequest], Awaitable[Any]]
LineSource = Callable[[AdminRequest], AsyncIterator[bytes]]  # raises at once if the request is invalid


@dataclass(frozen=True)
class AdminEndpoint:
    method: str
    path: str  # {name}: one segment; {name*}: all remaining segments
    summary: str
    handle: EndpointHandler
    request: Any = None  # type of the body; None: no body, except for PATCH
    reply: Any = None  # type of the reply; None: any JSON
    query: tuple[str, ...] = ()  # allowed query parameters; NAME*: all with this prefix
    status: int = 200
    uses_cloudflare_envelope: bool = False
    lines: LineSource | None = None  # the reply is JSON lines: see AdminAPI.export

    @cached_property
    def _path_pattern(self) -> re.Pattern[str]:
        text = re.escape(self.path).replace(r"\{", "{").replace(r"\}", "}").replace(r"\*", "*")
        text = re.sub(r"\{(\w+)\*\}", r"(?P<\1>.+)", text)
        return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", text))

    def match(self, path: str) -> dict[str, str] | None:
        """Return the path parameters if the percent-encoded path matches this endpoint, else None.

        Raise InvalidRequest if a decoded parameter is not UTF-8.
        """
        found = self._path_pattern.fullmatch(path)
        if found is None:
            return None
        try:
            return {name: unquote(part, errors="strict") for name, part in found.groupdict().items()}
        except UnicodeDecodeError as e:
            raise InvalidRequest(
                f"the path {path[:200]!r} is not valid UTF-8 after percent-decoding", hint="encode the path as UTF-8"
            ) from e

    @property
    def is_export(self) -> bool:
        return self.lines is not None

    @property
    def path_parameters(self) -> list[str]:
        return re.findall(r"\{(\w+)\*?\}", self.path)
