"""The layer that converts exceptions to error replies in the client's dialect (wire format).

Layers outside this one therefore see only replies. The only exception that still reaches them is cancellation.
"""

from __future__ import annotations

import logging

from emberline.core.errors import EmberlineError
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler
from emberline.gateway.error_replies import error_reply

log = logging.getLogger("emberline.gateway")


def errors_to_replies(inner: Handler) -> Handler:
    async def handle(call: GatewayRequest) -> GatewayReply:
        try:
            return await inner(call)
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception(
                    "Request failed with an internal error: provider=%s endpoint=%s", call.provider, call.endpoint
                )
            reply = error_reply(call.dialect, e)
            if call.attempts:
                last = call.attempts[-1]
                reply.provider, reply.model, reply.step_index = last.provider, last.model, last.step
            reply.micros = 0
            return reply

    return handle
