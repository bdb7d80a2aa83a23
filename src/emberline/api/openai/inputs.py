"""Prompts and embedding inputs, which come as a text, as token ids, or as a list of either."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from emberline.api.openai.sampling import TokenId
from emberline.core.errors import InvalidRequest

MAX_INPUTS = 2048  # of one request

TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Inputs = str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]


def each_input(inputs: Inputs, param: str) -> list[str | list[int]]:
    if isinstance(inputs, str):
        return [inputs]
    ids = [item for item in inputs if isinstance(item, int)]
    if len(ids) == len(inputs):
        return [ids]
    items = [item for item in inputs if not isinstance(item, int)]
    if ids or len({type(item) for item in items}) > 1:
        raise InvalidRequest(f"{param} mixes texts and token ids", param=param, hint="send a list of one kind")
    if len(items) > MAX_INPUTS:
        raise InvalidRequest(f"{param} has {len(items)} entries; at most {MAX_INPUTS} are taken", param=param)
    return items
