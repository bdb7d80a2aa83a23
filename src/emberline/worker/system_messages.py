"""Moves system messages to the beginning, for chat templates that reject them elsewhere.

Claude Code sends a system message after the user's first message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


def move_system_messages_first(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one system message, the first, that has the text of all.

    Messages of the user that become adjacent are joined, because many templates require alternating roles."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    moved: list[Message] = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    last_role = ""
    for message in messages:
        if message["role"] != "system":
            if last_role == "system" and message["role"] == "user" == moved[-1]["role"]:
                moved[-1] = {**moved[-1], "content": f"{moved[-1]['content']}\n\n{message['content']}"}
            else:
                moved.append(message)
        last_role = message["role"]
    return moved
