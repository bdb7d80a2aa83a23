"""Field names of Responses."""

from __future__ import annotations

from emberline.gateway.dialects.words import Words

WORDS = Words(
    plain={
        "max_output": "max_output_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "parallel_tools": "parallel_tool_calls",
        "stream": "stream",
        "user": "user",
        "metadata": "metadata",
    },
    others={
        "logprobs": "top_logprobs",
        "response_format": "text.format",
        "verbosity": "text.verbosity",
        "thinking": "input[]",
    },
    system="instructions",
    message="input[]",
    part="content[]",
    vital={
        "previous_response_id": "send the whole conversation as input",
        "conversation": "send the whole conversation as input",
        "prompt": "send instructions and input",
        "background": "wait for the reply, or stream it",
        "item_reference": "send the item itself",
        "compaction": "send the uncompacted conversation",
    },
)
