"""The layer that turns exceptions into replies in the client's dialect.

The layers outside of it see replies only."""

from __future__ import annotations

import logging

from emberline.core.errors import EmberlineError
from emberline.gateway.call import Call, Handler, Reply
from emberline.gateway.refusal import error_reply

log = logging.getLogger("emberline.gateway")


def told(inner: Handler) -> Handler:
    async def handle(call: Call) -> Reply:
        try:
            return await inner(call)
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception("internal error in a call: provider=%s endpoint=%s", call.provider, call.endpoint)
            reply = error_reply(call.dialect, e)
            if call.trail:
                last = call.trail[-1]
                reply.provider, reply.model, reply.step = last.provider, last.model, last.step
            reply.micros = 0
            return reply

    return handle
