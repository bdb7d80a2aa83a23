"""Field names of Anthropic's Messages."""

from __future__ import annotations

from emberline.gateway.dialects.words import Words

WORDS = Words(
    plain={
        "max_output": "max_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "stop": "stop_sequences",
        "stream": "stream",
    },
    others={
        "response_format": "output_config.format",
        "reasoning": "thinking",
        "parallel_tools": "tool_choice.disable_parallel_tool_use",
        "user": "metadata.user_id",
        "thinking": "messages[].content[].thinking",
    },
    message="messages[]",
    part="content[]",
    vital={
        "container": "remove it",
        "mcp_servers": "remove them",
        "compaction": "send the uncompacted conversation",
    },
)
