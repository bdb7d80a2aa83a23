"""Field names of Chat Completions."""

from __future__ import annotations

from emberline.gateway.dialects.field_names import FieldNames

FIELD_NAMES = FieldNames(
    direct={
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "seed": "seed",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
        "n": "n",
        "parallel_tools": "parallel_tool_calls",
        "verbosity": "verbosity",
        "stream": "stream",
        "user": "user",
        "metadata": "metadata",
    },
    special={
        "max_output": "max_completion_tokens",
        "reasoning": "reasoning_effort",
        "thinking": "messages[].reasoning_content",
    },
    message_path="messages[]",
    part_path="content[]",
    essential={"functions": "use tools", "function_call": "use tool_choice", "audio": "request text output"},
)
