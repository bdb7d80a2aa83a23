"""Prefill: how a provider is asked to go on with the assistant's last turn instead of beginning one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

# It just does ("bare"), a field of the request says so ("flag"), a field of the turn does ("prefix"); "": it cannot.
Prefill: TypeAlias = Literal["", "bare", "flag", "prefix"]


def marked(body: bytes, prefill: Prefill) -> Mapping[str, Any]:
    """The fields of a chat's request that say so."""
    match prefill:
        case "flag":  # of vLLM, and ours
            return {"continue_final_message": True, "add_generation_prompt": False}
        case "prefix":  # of Mistral and DeepSeek
            *earlier, last = msgspec.json.decode(body)["messages"]
            return {"messages": [*earlier, {**last, "prefix": True}]}
    return {}
