"""Fields of OpenAI, vLLM, SGLang and llama.cpp that are accepted without effect (`api/fields.py` has the rules).

They are hints about cost, speed and storage, and settings at their default value: without them the answer is the same.
Any other value would change the answer and is rejected by name.
"""

from __future__ import annotations

from typing import Annotated, Any

from emberline.api.fields import Empty, Hint, Off, only
from emberline.api.parse import Wire

On = Annotated[Any, only(True)]
One = Annotated[Any, only(1.0)]
Zero = Annotated[Any, only(0)]


class AcceptedFields(Wire, kw_only=True):
    """Fields of chat completions, text completions and responses."""

    # OpenAI's hints. Cached prefixes are found by their content, so a key has no effect.
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    prompt_cache_options: Hint = None
    # vLLM's fields
    use_beam_search: Off = None
    length_penalty: One = None
    early_stopping: Off = None
    detokenize: On = None
    spaces_between_special_tokens: Annotated[Any, only(True, False)] = None  # no supported tokenizer writes such spaces
    logits_processors: Empty = None
    kv_transfer_params: Empty = None
    vllm_xargs: Empty = None
    thinking_token_budget: Hint = None
    logprob_token_ids: None = None  # known and not supported
    # SGLang's fields
    no_stop_trim: Off = None
    stop_regex: Empty = None
    custom_logit_processor: Empty = None
    custom_params: Empty = None
    session_params: Empty = None
    lora_path: Empty = None
    return_hidden_states: Off = None
    return_routed_experts: Off = None
    return_cached_tokens_details: Off = None
    # llama.cpp's fields
    cache_prompt: Hint = None
    id_slot: Hint = None
    typical_p: One = None
    tfs_z: One = None
    mirostat: Zero = None
    mirostat_tau: Hint = None  # a parameter of mirostat, which is off
    mirostat_eta: Hint = None
    dynatemp_range: Zero = None
    dynatemp_exponent: Hint = None
    dry_multiplier: Zero = None
    xtc_probability: Zero = None
    top_n_sigma: Annotated[Any, only(-1, 0)] = None
    timings_per_token: Hint = None  # asks for timings beside the answer
    post_sampling_probs: Off = None
    return_progress: Hint = None
    lora: Empty = None
