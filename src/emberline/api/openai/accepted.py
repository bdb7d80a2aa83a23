"""Fields of OpenAI, vLLM, SGLang and llama.cpp that the server accepts and ignores.

Some fields are hints about cost, speed or storage: they are accepted with any value. Other fields are settings that
the server does not implement: they are accepted only with the value that means the default behaviour. Any other value
would change the answer and is rejected; the error names the field. `api/fields.py` defines the types of these fields.
"""

from __future__ import annotations

from typing import Annotated, Any

from emberline.api.fields import IgnoredField, OnlyEmpty, OnlyFalse, accepts_only, without_effect
from emberline.api.parse import WireStruct

OnlyTrue = Annotated[Any, accepts_only(True)]
OnlyOne = Annotated[Any, accepts_only(1.0)]
OnlyZero = Annotated[Any, accepts_only(0)]


class AcceptedFields(WireStruct, kw_only=True):
    """The accepted fields that chat completions, text completions and responses share."""

    # OpenAI's hints. Cached prefixes are found by their content, so a key has no effect.
    prompt_cache_key: IgnoredField = None
    prompt_cache_retention: IgnoredField = None
    prompt_cache_options: IgnoredField = None
    # vLLM's fields
    use_beam_search: OnlyFalse = None
    length_penalty: OnlyOne = None
    early_stopping: OnlyFalse = None
    detokenize: OnlyTrue = None
    spaces_between_special_tokens: Annotated[Any, accepts_only(True, False)] = None  # no tokenizer writes such spaces
    logits_processors: OnlyEmpty = None
    kv_transfer_params: OnlyEmpty = None
    vllm_xargs: Annotated[Any, without_effect({})] = None
    guided_decoding_backend: IgnoredField = None  # the server has one
    guided_whitespace_pattern: OnlyEmpty = None
    thinking_token_budget: IgnoredField = None
    logprob_token_ids: None = None  # known and not supported
    # SGLang's fields
    no_stop_trim: OnlyFalse = None
    stop_regex: OnlyEmpty = None
    custom_logit_processor: OnlyEmpty = None
    custom_params: OnlyEmpty = None
    session_params: OnlyEmpty = None
    lora_path: OnlyEmpty = None
    return_hidden_states: OnlyFalse = None
    return_routed_experts: OnlyFalse = None
    return_cached_tokens_details: OnlyFalse = None
    # llama.cpp's fields
    cache_prompt: IgnoredField = None
    id_slot: IgnoredField = None
    typical_p: OnlyOne = None
    tfs_z: OnlyOne = None
    mirostat: OnlyZero = None
    mirostat_tau: IgnoredField = None  # a parameter of mirostat, which is off
    mirostat_eta: IgnoredField = None
    dynatemp_range: OnlyZero = None
    dynatemp_exponent: IgnoredField = None
    dry_multiplier: OnlyZero = None
    xtc_probability: OnlyZero = None
    top_n_sigma: Annotated[Any, accepts_only(-1, 0)] = None
    timings_per_token: IgnoredField = None  # asks for timings beside the answer
    post_sampling_probs: OnlyFalse = None
    return_progress: IgnoredField = None
    lora: OnlyEmpty = None
