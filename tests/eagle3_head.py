"""Random EAGLE-3 heads for tests, in the published checkpoint format, and their meaning in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor


def write_eagle3_head(
    directory: Path, target: dict[str, Any], *, draft_vocab: int, seed: int = 0, **changes: Any
) -> Path:
    """Write a head for a model with the config.json `target`. `changes`: other values of the head's config."""
    config = {
        **target,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        **changes,
    }
    hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (ffn, hidden),
        "midlayer.mlp.up_proj.weight": (ffn, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, ffn),
        "lm_head.weight": (draft_vocab, hidden),
    }
    tensors = {name: torch.randn(size, generator=random) * 2.0 / size[-1] ** 0.5 for name, size in shapes.items()}
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=random)
    chosen = torch.randperm(config["vocab_size"], generator=random)[:draft_vocab].sort().values
    tensors["d2t"] = chosen - torch.arange(draft_vocab)
    tensors["t2d"] = torch.isin(torch.arange(config["vocab_size"]), chosen)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@torch.inference_mode()
def draft_by_definition(
    directory: Path, embedding: Tensor, states: Tensor, following: list[int], length: int
) -> list[int]:
    """Return the draft of a head in float32, without a cache: every pass computes all positions again.

    `states`: the target model's hidden states [T, 3 * hidden] of all positions. `following`: the token behind each."""
    config, w = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    eps, dim = config["rms_norm_eps"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def norm(x: Tensor, name: str) -> Tensor:
        normed: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]
        return normed

    def rotate(x: Tensor) -> Tensor:  # [T, heads, dim]
        angle = torch.arange(len(x))[:, None] * config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angle.cos().repeat(1, 2)[:, None], angle.sin().repeat(1, 2)[:, None]
        turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        rotated: Tensor = x * cos + turned * sin
        return rotated

    hidden, tokens, draft = F.linear(states, w["fc.weight"]), list(following), []
    for _ in range(length):
        first = norm(embedding[tokens], "midlayer.input_layernorm")
        both = torch.cat([first, norm(hidden, "midlayer.hidden_norm")], -1)
        q, k, v = (F.linear(both, w[f"midlayer.self_attn.{name}_proj.weight"]) for name in "qkv")
        q, k = rotate(q.view(-1, heads, dim)), rotate(k.view(-1, kv_heads, dim))
        k, v = (x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v.view(-1, kv_heads, dim)))
        mixed = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = hidden + F.linear(mixed, w["midlayer.self_attn.o_proj.weight"])
        inner = norm(x, "midlayer.post_attention_layernorm")
        gate, up = (F.linear(inner, w[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w["midlayer.mlp.down_proj.weight"])
        best = int(F.linear(norm(x[-1], "norm"), w["lm_head.weight"]).argmax())
        draft.append(best + int(w["d2t"][best]))
        tokens.append(draft[-1])
        hidden = torch.cat([hidden, x[-1:]])
    return draft
