"""Field names of Gemini's generateContent."""

from __future__ import annotations

from emberline.gateway.dialects.field_names import FieldNames

FIELD_NAMES = FieldNames(
    direct={
        "max_output": "maxOutputTokens",
        "temperature": "temperature",
        "top_p": "topP",
        "top_k": "topK",
        "stop": "stopSequences",
        "seed": "seed",
        "presence_penalty": "presencePenalty",
        "frequency_penalty": "frequencyPenalty",
        "n": "candidateCount",
    },
    direct_prefix="generationConfig.",
    special={
        "logprobs": "generationConfig.responseLogprobs",
        "response_format": "generationConfig.responseJsonSchema",
        "reasoning": "generationConfig.thinkingConfig",
        "tool_choice": "toolConfig.functionCallingConfig",
        "thinking": "contents[].parts[].thought",
    },
    system_path="systemInstruction",
    message_path="contents[]",
    part_path="parts[]",
    essential={"cachedContent": "send the content itself"},
)
