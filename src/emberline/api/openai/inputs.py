"""The `prompt` of completions and `input` of embeddings: text, token ids, or a list of either."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from emberline.api.openai.sampling import TokenId
from emberline.core.errors import InvalidRequest

MAX_INPUTS_PER_REQUEST = 2048

TokenIdList = Annotated[list[TokenId], Meta(min_length=1)]
Inputs = str | Annotated[list[str | TokenId | TokenIdList], Meta(min_length=1)]


def list_inputs(inputs: Inputs, param: str) -> list[str | list[int]]:
    """Return the inputs as a list. Raises InvalidRequest for mixed kinds and for too many inputs."""
    if isinstance(inputs, str):
        return [inputs]
    ids = [item for item in inputs if isinstance(item, int)]
    if len(ids) == len(inputs):
        return [ids]
    items = [item for item in inputs if not isinstance(item, int)]
    if ids or len({type(item) for item in items}) > 1:
        raise InvalidRequest(
            f"{param} mixes texts and token ids", param=param, hint="send a list of texts or one of ids"
        )
    if len(items) > MAX_INPUTS_PER_REQUEST:
        what = f"{param} has {len(items)} entries; the limit is {MAX_INPUTS_PER_REQUEST}"
        raise InvalidRequest(what, param=param, hint="split the request")
    return items
