"""Anthropic's `thread`, by which a provider stores the messages of a conversation. Other providers do not."""

from __future__ import annotations

from emberline.core.errors import ThreadNotFound
from emberline.gateway.dialects.canonical import Json


def remove_thread(fields: Json) -> None:
    """Remove the request's `thread` if it asks for a new one, which changes nothing.

    Raises ThreadNotFound if it stands for earlier messages; clients then send all messages again."""
    thread = fields.pop("thread", None)
    if thread is not None and thread != {"type": "create"}:
        raise ThreadNotFound(
            "thread is not supported by this model's provider", param="thread", hint="send all messages without thread"
        )
