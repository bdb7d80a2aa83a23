"""Field names of Anthropic's Messages."""

from __future__ import annotations

from emberline.gateway.dialects.field_names import FieldNames

FIELD_NAMES = FieldNames(
    direct={
        "max_output": "max_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "stop": "stop_sequences",
        "stream": "stream",
    },
    special={
        "response_format": "output_config.format",
        "reasoning": "thinking",
        "parallel_tools": "tool_choice.disable_parallel_tool_use",
        "user": "metadata.user_id",
        "thinking": "messages[].content[].thinking",
    },
    message_path="messages[]",
    part_path="content[]",
    essential={"compaction": "send the uncompacted conversation"},
)
