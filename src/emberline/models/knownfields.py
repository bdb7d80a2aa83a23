"""check_known_fields: refuses a config.json whose fields would change the arithmetic in a way that is not known here.

Families whose checkpoints were loaded before this check existed are not strict: for these, only fields that other
families use are refused, because many published configs carry fields of the tools that wrote them.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from emberline.core.errors import UnsupportedModel
from emberline.models.architecture import Architecture
from emberline.models.registry import ARCHITECTURES

# Fields that models/config.py reads for every architecture.
READ_FIELDS = {
    "model_type", "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "eos_token_id", "rope_theta",
    "rope_scaling", "rope_parameters", "original_max_position_embeddings", "quantization_config", "intermediate_size",
    "num_experts", "num_local_experts",
}  # fmt: skip
LATENT_FIELDS = {"kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"}
STATE_FIELDS = {"linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"}
STATE_FIELDS |= {"linear_conv_kernel_dim", "layer_types", "full_attention_interval"}
WINDOW_FIELDS = {"sliding_window", "layer_types"}
ROPE_FIELDS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim",
    "short_factor", "long_factor", "partial_rotary_factor",
}  # fmt: skip
# Fields without effect on the logits: of training, of generation, of the tools that wrote the file.
HARMLESS_FIELDS = {
    "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "auto_map", "pretraining_tp",
    "gradient_checkpointing", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "return_dict_in_generate", "id2label", "label2id", "num_labels", "problem_type", "tokenizer_class",
    "finetuning_task", "task_specific_params", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "chunk_size_feed_forward", "router_aux_loss_coef", "router_jitter_noise", "cache_implementation",
    "model_max_length", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p",
    "num_beams", "num_beam_groups", "early_stopping", "length_penalty", "repetition_penalty",
    "no_repeat_ngram_size", "diversity_penalty", "encoder_no_repeat_ngram_size", "num_return_sequences",
    "remove_invalid_values", "prefix", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "attn_implementation",
    "tie_last_hidden_states", "is_llama_config", "is_causal", "name_or_path",
}  # fmt: skip
HARMLESS_NAMES = re.compile(
    r"_.*|.*dropout|.*_pdrop|.*_token_id|.*_token_index|.*_version|unsloth_.*|transformers\.js.*|transformers_js.*"
)


def check_known_fields(config: Mapping[str, Any], arch: Architecture) -> None:
    """Raise UnsupportedModel for a field of config.json that is not known for this architecture.

    A field that is null, false, 0 or empty counts as absent.
    """
    read = arch.read_fields() | (set() if arch.experts is None else arch.experts.read_fields())
    for name, value in arch.fixed_fields.items():
        if config.get(name, value) not in (value, None):
            raise _unknown_field_error(config, name, f"only {value!r} is supported")
    if not arch.is_strict:
        known = read
        unknown = sorted(name for name in FAMILY_FIELDS - known if config.get(name))
    else:
        known = READ_FIELDS | HARMLESS_FIELDS | read | set(arch.ignored_fields) | set(arch.fixed_fields)
        known |= WINDOW_FIELDS if arch.window or arch.unrotated == "unless_rope" else set()
        known |= {"floor_scale", "attn_scale"} if arch.temperature_flag_field else set()
        known |= LATENT_FIELDS if arch.latent_attention else set()
        known |= STATE_FIELDS if arch.delta_tensors else set()
        known |= {"attention_chunk_size"} if arch.chunked_windows else set()
        known |= {"no_rope_layers", "no_rope_layer_interval"} if arch.unrotated == "listed" else set()
        known |= {"position_embedding_type"} if arch.unrotated == "unless_rope" else set()
        known |= {"partial_rotary_factor"} if arch.partial_rotary else set()
        unknown = sorted(
            name for name, value in config.items() if value and name not in known and not HARMLESS_NAMES.fullmatch(name)
        )
        _check_rope_fields(config, ROPE_FIELDS | set(arch.ignored_fields))
    if unknown:
        raise _unknown_field_error(config, unknown[0], "the field is not known for this model type")


def _check_rope_fields(config: Mapping[str, Any], known: set[str]) -> None:
    for section in ("rope_parameters", "rope_scaling"):
        value = config.get(section)
        nested = [value, *value.values()] if isinstance(value, dict) else []
        for part in nested:
            for name in part if isinstance(part, dict) else ():
                if name not in known and not isinstance(part[name], dict) and part[name]:
                    raise UnsupportedModel(f"config.json sets {section}, {name[:80]}, which is not supported")


def _unknown_field_error(config: Mapping[str, Any], name: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"config.json sets {name[:80]} to {str(config[name])[:80]!r} for {str(config.get('model_type'))[:80]}: {why}",
        hint="if the field does not change what the model computes, remove it from config.json",
    )


def _family_fields() -> set[str]:
    """Return the fields that change the arithmetic of a strict family and that Llama does not have.

    The families with `is_strict` are strict: their checkpoints may have known fields only."""
    strict = [arch for arch in ARCHITECTURES.values() if arch.is_strict]
    others = {"no_rope_layers", "use_bidirectional_attention", "attn_logit_softcapping"}
    others |= STATE_FIELDS - WINDOW_FIELDS
    plain = {"attention_bias", "mlp_bias", "use_sliding_window", "intermediate_size", "hidden_act", "rms_norm_eps"}
    plain |= {"layer_norm_eps", "rope_theta", "hidden_activation", "sliding_window_pattern", "max_window_layers"}
    plain |= {"qkv_bias", "num_nextn_predict_layers", "mtp_num_hidden_layers", "moe_intermediate_size"}
    return set().union(*(arch.read_fields() for arch in strict)) - plain | others


FAMILY_FIELDS = _family_fields()
