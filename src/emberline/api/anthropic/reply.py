"""Makes the writer of the engine's messages in Anthropic's protocol."""

from __future__ import annotations

from emberline.api.anthropic.request import MessagesCall
from emberline.wire.anthropic import AnthropicWriter
from emberline.wire.reply_context import ReplyContext


def make_writer(call: MessagesCall, id: str, created: int, fingerprint: str) -> AnthropicWriter:
    """`created` and `fingerprint` are not part of this protocol; the other protocols' functions take them too."""
    context = ReplyContext(call.common.model, id=id)
    return AnthropicWriter(context, of_engine=True, shows_thinking=call.shows_thinking, stream=call.stream)
