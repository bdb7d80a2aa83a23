"""Field names of Responses."""

from __future__ import annotations

from emberline.gateway.dialects.field_names import FieldNames

FIELD_NAMES = FieldNames(
    direct={
        "max_output": "max_output_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "parallel_tools": "parallel_tool_calls",
        "stream": "stream",
        "user": "user",
        "metadata": "metadata",
    },
    special={
        "logprobs": "top_logprobs",
        "response_format": "text.format",
        "verbosity": "text.verbosity",
        "thinking": "input[]",
    },
    system_path="instructions",
    message_path="input[]",
    part_path="content[]",
    essential={
        "previous_response_id": "send the whole conversation as input",
        "conversation": "send the whole conversation as input",
        "prompt": "send instructions and input",
        "background": "wait for the reply, or stream it",
        "item_reference": "send the item itself",
        "compaction": "send the uncompacted conversation",
    },
)
