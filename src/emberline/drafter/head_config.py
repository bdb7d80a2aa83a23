"""HeadConfig: the sizes of an EAGLE-3 head, and its config.json. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.models.config import ModelConfig
from emberline.models.fields import ConfigFields

ARCHITECTURE = "LlamaForCausalLMEagle3"
DRAFT_VOCAB_DIVISOR = 3  # a third of the vocabulary covers nearly all output
MIN_DRAFT_VOCAB, MAX_DRAFT_VOCAB = 16384, 32000  # limits of the default, in tokens
MAX_SIZE = 1 << 22


@dataclass(frozen=True, slots=True)
class HeadConfig:
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_context: int
    vocab: int  # tokens of the target model
    draft_vocab: int  # tokens that the head can draft
    layer_ids: tuple[int, ...]  # layers of the target whose inputs the head reads

    @staticmethod
    def for_model(model: ModelConfig, draft_vocab: int) -> HeadConfig:
        """Return the config of a head for this model, with the sizes of one of the model's own layers."""
        return HeadConfig(
            hidden=model.hidden,
            ffn=model.ffn,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            norm_eps=model.norm_eps,
            rope_theta=model.rope.theta,
            max_context=model.longest_context,
            vocab=model.vocab,
            draft_vocab=draft_vocab,
            layer_ids=default_layer_ids(model.layers),
        )

    @staticmethod
    def from_json(values: dict[str, Any], where: str) -> HeadConfig:
        """Return the config in a head's config.json. Raise ModelFileError if it describes another model."""
        fields = ConfigFields(values, where)
        if list(fields.text_list("architectures")) != [ARCHITECTURE]:
            raise ModelFileError(f"{where} is not the config of an EAGLE-3 head: architectures must be {ARCHITECTURE}")
        section = fields.section("eagle_config")
        return HeadConfig(
            hidden=fields.size("hidden_size", maximum=MAX_SIZE),
            ffn=fields.size("intermediate_size", maximum=MAX_SIZE),
            heads=fields.size("num_attention_heads", maximum=MAX_SIZE),
            kv_heads=fields.size("num_key_value_heads", maximum=MAX_SIZE),
            head_dim=fields.size("head_dim", maximum=MAX_SIZE),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=fields.number("rope_theta", 10000.0),
            max_context=fields.size("max_position_embeddings", maximum=1 << 30),
            vocab=fields.size("vocab_size", maximum=MAX_SIZE),
            draft_vocab=fields.size("draft_vocab_size", maximum=MAX_SIZE),
            layer_ids=section.id_list("eagle_aux_hidden_state_layer_ids"),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_context,
            "vocab_size": self.vocab,
            "draft_vocab_size": self.draft_vocab,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.layer_ids)},
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight of the head, by its name in the checkpoint."""
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "fc.weight": (hidden, len(self.layer_ids) * hidden),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, q),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            "midlayer.mlp.gate_proj.weight": (self.ffn, hidden),
            "midlayer.mlp.up_proj.weight": (self.ffn, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, self.ffn),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab, hidden),
        }


def default_layer_ids(layers: int) -> tuple[int, ...]:
    """Return the layers of a target whose inputs a head reads: an early, a middle and a late one."""
    if layers < 3:
        hint = "use a drafter of another kind"
        raise UnsupportedModel(f"an EAGLE-3 head needs a model with at least 3 layers, not {layers}", hint=hint)
    early, middle, late = 2, layers // 2, layers - 3
    return (early, middle, late) if early < middle < late else (0, layers // 2, layers - 1)


def default_draft_vocab(vocab: int) -> int:
    return min(vocab, MAX_DRAFT_VOCAB, max(MIN_DRAFT_VOCAB, vocab // DRAFT_VOCAB_DIVISOR))
