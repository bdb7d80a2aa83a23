"""ModelConfig: the checked config of a decoder of any supported architecture, from config.json.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.checkpoint import Checkpoint
from emberline.models.architecture import Architecture
from emberline.models.attention_parts import read_latent_config
from emberline.models.decoder_parts import LLAMA_PARTS, DecoderParts, read_rotated_layers
from emberline.models.endtokens import collect_end_tokens
from emberline.models.expertsconfig import ExpertsConfig
from emberline.models.fields import ConfigFields
from emberline.models.knownfields import check_known_fields
from emberline.models.quantised_tensors import read_loaded_quantisation
from emberline.models.registry import ARCHITECTURES
from emberline.models.ropeconfig import MAX_CONTEXT_TOKENS, RopeConfig, read_ropes
from emberline.models.textmodel import TEXT_MODEL_TYPES, select_text_config

MAX_DEFAULT_CONTEXT_TOKENS = 1 << 20  # the tables of rotary angles of a longer context need gigabytes
# Larger sizes are rejected as damaged or malicious before anything is allocated.
MAX_HIDDEN, MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_FFN, MAX_VOCAB = 1 << 17, 1024, 4096, 1024, 1 << 20, 1 << 22

EXPERT_FIELDS = {"num_experts": "a mixture of experts", "num_local_experts": "a mixture of experts"}
UNSUPPORTED_FIELDS = {
    "n_routed_experts": "a mixture of experts",
    "n_shared_experts": "a shared expert",
    "num_shared_experts": "a shared expert",
    "shared_expert_intermediate_size": "a shared expert",
    "kv_lora_rank": "multi-head latent attention",
}

EMBEDDING_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"  # in the checkpoints of all families


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # inner width of the feed-forward network in dense layers
    experts: ExpertsConfig | None
    vocab: int
    norm_eps: float
    rope: RopeConfig
    # Attention window of each layer in tokens, including the query's own; 0: unlimited. A chunk is a window that starts
    # at a multiple of its size: see parts.attention.chunked_windows.
    windows: tuple[int, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    max_context: int  # default context in tokens
    longest_context: int  # largest context that may be configured
    eos: tuple[int, ...]
    # Not part of `repr`, so that KV blocks of Llama models that were stored before this field existed stay valid.
    parts: DecoderParts = field(default=LLAMA_PARTS, repr=False)
    mtp_layers: int = field(default=0, repr=False)  # layers for multi-token prediction in the checkpoint: see mtp.py
    weight_row_unit: int = field(default=1, repr=False)  # a rank gets quantised rows in multiples of this
    vocab_rows: int = field(default=0, repr=False)  # rows of the embedding that a rank has; 0: all

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Return the rotary embedding of a layer; None: it has none."""
        if layer in self.parts.unrotated_layers:
            return None
        return self.parts.local_rope or self.rope if self.windows[layer] else self.rope

    @property
    def mtp_tensor_prefix(self) -> str:
        """How the names of the tensors of a head for multi-token prediction begin: see mtp.py."""
        module = ARCHITECTURES[self.model_type].mtp_module
        return f"{module}." if module else f"model.layers.{self.layers}."

    @property
    def is_default_context_cut(self) -> bool:
        """Whether the default context is shorter than the model's because of MAX_DEFAULT_CONTEXT_TOKENS."""
        return self.max_context == MAX_DEFAULT_CONTEXT_TOKENS < self.longest_context

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> ModelConfig:
        config = select_text_config(config)
        arch = _find_architecture(ConfigFields(config, "config.json"))
        fields = ConfigFields(arch.fill_defaults(config), "config.json")
        _check_supported(fields, arch)
        check_known_fields(config, arch)

        def resolve_rule(value: bool | str) -> bool:
            return fields.flag(value) if isinstance(value, str) else value

        hidden = fields.size("hidden_size", maximum=MAX_HIDDEN)
        layers = fields.size("num_hidden_layers", maximum=MAX_LAYERS)
        heads, kv_heads, head_dim = (_read_latent_heads if arch.latent_attention else _read_head_counts)(fields, hidden)
        max_position = fields.size("max_position_embeddings", maximum=MAX_CONTEXT_TOKENS)
        rotary_dim = fields.size("qk_rope_head_dim", maximum=MAX_HEAD_DIM) if arch.latent_attention else head_dim
        ropes = read_ropes(fields, arch, rotary_dim, max_position)
        served, longest = _default_and_max_context(ropes.rope, max_position)
        if arch.has_final_max_position:
            served = longest = max_position
        read_windows = _read_chunk_sizes if arch.chunked_windows else _read_window_sizes
        windows = read_windows(fields, arch, layers) if resolve_rule(arch.window) else (0,) * layers
        return ModelConfig(
            model_type=fields.text("model_type"),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=fields.size(arch.ffn_field, maximum=MAX_FFN),
            experts=None if arch.experts is None else ExpertsConfig.from_hf(fields, arch.experts, layers),
            vocab=fields.size("vocab_size", maximum=MAX_VOCAB),
            norm_eps=fields.number(arch.norm_eps_field),
            rope=ropes.rope,
            windows=windows,
            qkv_bias=resolve_rule(arch.qkv_bias),
            o_bias=resolve_rule(arch.o_bias),
            mlp_bias=resolve_rule(arch.mlp_bias),
            qk_norm=resolve_rule(arch.qk_norm),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            max_context=min(served, MAX_DEFAULT_CONTEXT_TOKENS),
            longest_context=longest,
            eos=fields.id_list("eos_token_id"),
            parts=DecoderParts.from_hf(fields, arch, hidden, windows, ropes),
            mtp_layers=_read_mtp_layers(fields, arch),
            weight_row_unit=_read_weight_row_unit(config),
        )

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> ModelConfig:
        """Return the config of a checkpoint. Its end tokens are collected from all files of the checkpoint."""
        config = ModelConfig.from_hf(checkpoint.config)
        turn_ends = ARCHITECTURES[config.model_type].turn_end_tokens
        return replace(config, eos=collect_end_tokens(checkpoint, config.vocab, turn_ends))


def _find_architecture(fields: ConfigFields) -> Architecture:
    model_type = fields.text("model_type")
    if model_type not in ARCHITECTURES:
        hint = f"supported model types: {' '.join([*ARCHITECTURES, *TEXT_MODEL_TYPES])}"
        raise UnsupportedModel(f"config.json: model_type {model_type[:80]!r} is not supported", hint=hint)
    return ARCHITECTURES[model_type]


def _check_supported(fields: ConfigFields, arch: Architecture) -> None:
    model_type = fields.text("model_type")
    known = arch.experts.read_fields() | EXPERT_FIELDS.keys() if arch.experts else set()
    known |= {"kv_lora_rank"} if arch.latent_attention else set()
    for name, what in (UNSUPPORTED_FIELDS | EXPERT_FIELDS).items():
        if fields.values.get(name) and name not in known:
            raise UnsupportedModel(f"config.json sets {name}: {what} is not supported for {model_type}")
    read_loaded_quantisation(fields.values)
    classes = fields.text_list("architectures")
    if classes and not any(name.endswith("ForCausalLM") for name in classes):
        raise UnsupportedModel(f"config.json: {classes[0][:80]} is not a causal language model")
    if not arch.is_strict:
        return
    kinds = set(fields.text_list("layer_types"))
    if arch.unrotated == "unless_rope" and (not kinds or kinds - {"attention", "full_attention"}):
        kind = min(kinds - {"attention", "full_attention"}, default="linear_attention")
        raise UnsupportedModel(f"config.json: layer_types has {kind[:80]!r}, which is not supported for {model_type}")
    has_windows = fields.flag(arch.window) if isinstance(arch.window, str) else True
    if "sliding_attention" in kinds and not has_windows:
        raise UnsupportedModel(f"config.json: layer_types has 'sliding_attention', but {arch.window} is not true")


def _read_head_counts(fields: ConfigFields, hidden: int) -> tuple[int, int, int]:
    heads = fields.size("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = fields.size("num_key_value_heads", heads, maximum=MAX_HEADS)
    if heads % kv_heads:
        raise ModelFileError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if not fields.has_field("head_dim") and hidden % heads:
        raise ModelFileError(
            f"config.json: hidden_size {hidden} cannot be divided by {heads} heads, and there is no head_dim"
        )
    return heads, kv_heads, fields.size("head_dim", hidden // heads, maximum=MAX_HEAD_DIM)


def _read_mtp_layers(fields: ConfigFields, arch: Architecture) -> int:
    return fields.size(arch.mtp_layers_field, 0, minimum=0, maximum=MAX_LAYERS) if arch.mtp_layers_field else 0


def _read_weight_row_unit(config: Mapping[str, Any]) -> int:
    found = read_loaded_quantisation(config)
    return 1 if found is None else max(scheme.format.row_unit for scheme in found.schemes)


def _read_latent_heads(fields: ConfigFields, hidden: int) -> tuple[int, int, int]:
    """Return the numbers of query heads and of KV heads, and the elements that are cached per token.

    There is one KV head, which all query heads share."""
    heads = fields.size("num_attention_heads", maximum=MAX_HEADS)
    if fields.size("num_key_value_heads", heads, maximum=MAX_HEADS) != heads:
        raise fields.invalid_error("num_key_value_heads", f"num_attention_heads ({heads}) for latent attention")
    return heads, 1, read_latent_config(fields).cached_dim


def _read_window_sizes(fields: ConfigFields, arch: Architecture, layers: int) -> tuple[int, ...]:
    if not fields.has_field("sliding_window"):
        return (0,) * layers
    window = fields.size("sliding_window", maximum=MAX_CONTEXT_TOKENS)
    if not arch.has_layer_types:
        if set(fields.text_list("layer_types")) - {"sliding_attention"}:
            message = f"layer_types has layers without a window, which is not supported for {fields.text('model_type')}"
            raise UnsupportedModel(f"config.json: {message}", hint="set sliding_window to null, or remove layer_types")
        return (window,) * layers
    if not fields.has_field("layer_types") and arch.window_pattern:
        pattern = arch.window_pattern
        if arch.window_pattern_field:
            pattern = fields.size(arch.window_pattern_field, pattern, maximum=1 << 30)
        return tuple(window if (layer + 1) % pattern else 0 for layer in range(layers))
    if not fields.has_field("layer_types") and arch.unrotated == "listed":
        return tuple(0 if rotates else window for rotates in read_rotated_layers(fields, layers))
    if not fields.has_field("layer_types"):
        first = fields.size(arch.first_window_field, minimum=0, maximum=1 << 30) if arch.first_window_field else 0
        return tuple(0 if layer < first else window for layer in range(layers))
    return tuple(window if is_local else 0 for is_local in _read_layer_types(fields, layers, "sliding_attention"))


def _read_chunk_sizes(fields: ConfigFields, arch: Architecture, layers: int) -> tuple[int, ...]:
    if fields.has_field("layer_types"):
        is_chunked = _read_layer_types(fields, layers, "chunked_attention")
    else:
        is_chunked = read_rotated_layers(fields, layers)
    if not any(is_chunked):
        return (0,) * layers
    chunk = fields.size("attention_chunk_size", maximum=MAX_CONTEXT_TOKENS)
    return tuple(chunk if chunked else 0 for chunked in is_chunked)


def _read_layer_types(fields: ConfigFields, layers: int, local_kind: str) -> tuple[bool, ...]:
    """Return for each layer whether its entry in layer_types is `local_kind` (True) or full_attention (False)."""
    kinds = fields.text_list("layer_types")
    if len(kinds) != layers:
        raise fields.invalid_error("layer_types", f"a list of {layers} layer types")
    if unknown := set(kinds) - {"full_attention", local_kind}:
        raise UnsupportedModel(f"config.json: layer_types has {min(unknown)[:80]!r}, which is not supported")
    return tuple(kind == local_kind for kind in kinds)


def _default_and_max_context(rope: RopeConfig, max_position: int) -> tuple[int, int]:
    """Return the default and the largest context, in tokens.

    With linear, dynamic or yarn scaling, max_position_embeddings is by convention the length before scaling. Linear and
    yarn scaling change every angle, so the default is the scaled length. Dynamic scaling changes no angle within the
    original length, so the default is the original length.
    """
    match rope.kind:
        case "linear":
            served = longest = int(max_position * rope.factor)
        case "yarn":
            served = longest = max(max_position, int(rope.original_context * rope.factor))
        case "dynamic":
            served, longest = max_position, int(max_position * rope.factor)
        case _:
            served = longest = max_position
    if longest > MAX_CONTEXT_TOKENS:
        raise ModelFileError(
            f"config.json: rope scaling extends the context to {longest} tokens; the limit is {MAX_CONTEXT_TOKENS}"
        )
    return served, longest
