"""Assistant prefill: asks a provider to continue the last assistant message, not to start a new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

# "bare": the provider continues a final assistant message without further fields; "flag": a field of the request asks
# for it; "prefix": a field of the message asks for it; "": not supported.
AssistantPrefill: TypeAlias = Literal["", "bare", "flag", "prefix"]


def prefill_fields(body: bytes, prefill: AssistantPrefill) -> Mapping[str, Any]:
    """Return the changed fields of a chat request that make the provider continue the last message.

    The last message must be an assistant message.
    """
    match prefill:
        case "flag":  # vLLM and Emberline
            return {"continue_final_message": True, "add_generation_prompt": False}
        case "prefix":  # Mistral and DeepSeek
            *earlier, last = msgspec.json.decode(body)["messages"]
            return {"messages": [*earlier, {**last, "prefix": True}]}
    return {}
