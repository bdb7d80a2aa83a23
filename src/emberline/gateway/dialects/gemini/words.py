"""Field names of Gemini's generateContent."""

from __future__ import annotations

from emberline.gateway.dialects.words import Words

WORDS = Words(
    plain={
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
    place="generationConfig.",
    others={
        "logprobs": "generationConfig.responseLogprobs",
        "response_format": "generationConfig.responseJsonSchema",
        "reasoning": "generationConfig.thinkingConfig",
        "tool_choice": "toolConfig.functionCallingConfig",
        "thinking": "contents[].parts[].thought",
    },
    system="systemInstruction",
    message="contents[]",
    part="parts[]",
    vital={"cachedContent": "send the content itself"},
)
