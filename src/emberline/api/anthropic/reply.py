"""Makes the writer that renders a reply of the engine as an Anthropic message."""

from __future__ import annotations

from emberline.api.anthropic.request import MessagesCall
from emberline.wire.anthropic import AnthropicWriter
from emberline.wire.reply_context import ReplyContext


def make_writer(call: MessagesCall, id: str, created: int, fingerprint: str) -> AnthropicWriter:
    """Return the writer for the reply to `call`.

    `created` and `fingerprint` are unused; they are parameters of every protocol's make_writer.
    """
    context = ReplyContext(call.common.model, id=id)
    return AnthropicWriter(context, from_engine=True, shows_thinking=call.shows_thinking, stream=call.stream)
