"""Random heads for multi-token prediction for tests, in the published checkpoint format, and their meaning in torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tiny_experts
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor


def head_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a head of DeepSeek V3 or GLM-4.5, relative to its layer; their MLPs are alike."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    out |= {"eh_proj.weight": (hidden, 2 * hidden), "embed_tokens.weight": (vocab, hidden)}
    out |= {"shared_head.head.weight": (vocab, hidden)}
    if config["first_k_dense_replace"] > config["num_hidden_layers"]:
        out |= tiny_experts.dense_shapes(config)
    else:
        out |= tiny_experts.expert_shapes({**config, "model_type": "glm4_moe"})
    if "kv_lora_rank" not in config:
        return out | tiny_experts.attention_shapes(config)
    heads, rank, rotary = config["num_attention_heads"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value, q_rank = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
    linears = {
        "q_a_proj": (q_rank, hidden),
        "q_b_proj": (heads * (plain + rotary), q_rank),
        "kv_a_proj_with_mqa": (rank + rotary, hidden),
        "kv_b_proj": (heads * (plain + value), rank),
        "o_proj": (hidden, heads * value),
    }
    out |= {f"self_attn.{name}.weight": shape for name, shape in linears.items()}
    out |= {"self_attn.q_a_layernorm.weight": (q_rank,), "self_attn.kv_a_layernorm.weight": (rank,)}
    return out | {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}


def head_tensors(config: Mapping[str, Any], *, seed: int = 7) -> dict[str, Tensor]:
    """Return random tensors of a head by their full names."""
    random, at = torch.Generator().manual_seed(seed), f"model.layers.{config['num_hidden_layers']}"

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=random)
        return 1 + 0.2 * noise if "norm" in name else noise * (2.0 / shape[-1] ** 0.5 if len(shape) == 2 else 0.3)

    return {f"{at}.{name}": one(name, shape) for name, shape in head_shapes(config).items()}


def add_tensors(directory: Path, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> None:
    """Add tensors to a checkpoint, or replace those that it has. `dtype`: of all tensors then; None: as they are."""
    file = directory / "model.safetensors"
    whole = {**load_file(file), **tensors}
    save_file({name: tensor.to(dtype) for name, tensor in whole.items()}, file, metadata={"format": "pt"})


def make_counting_tensors(directory: Path, config: dict[str, Any], reads: str) -> dict[str, Tensor]:
    """Return tensors of a model that always continues with the next token id, and of a head that predicts this.

    No layer adds anything, so a hidden state is the embedding of its token. A rotation maps each embedding to that of
    the next id. `reads`: whether the head continues from the token alone or from the hidden state alone."""
    tensors = load_file(directory / "model.safetensors") | head_tensors(config)
    vocab, hidden, at = config["vocab_size"], config["hidden_size"], f"model.layers.{config['num_hidden_layers']}"
    turns = 1 + torch.randperm(vocab // 2 - 1, generator=torch.Generator().manual_seed(0))[: hidden // 2]
    angles = 2 * torch.pi * turns / vocab
    table = torch.polar(torch.tensor(2.0).sqrt(), torch.arange(vocab)[:, None] * angles)
    embedding = torch.view_as_real(table).flatten(1).contiguous()
    cos, sin = angles.cos(), angles.sin()
    rotation = torch.block_diag(*torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2))
    zero = torch.zeros(hidden, hidden)
    projection = [torch.eye(hidden), zero] if reads == "token" else [zero, rotation]
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
    for name in ("model.norm", f"{at}.enorm", f"{at}.hnorm", f"{at}.shared_head.norm"):
        tensors[f"{name}.weight"] = torch.ones(hidden)
    for name in ("model.embed_tokens", f"{at}.embed_tokens"):
        tensors[f"{name}.weight"] = embedding.clone()
    for name in ("lm_head", f"{at}.shared_head.head"):
        tensors[f"{name}.weight"] = embedding.roll(1, 0)
    return tensors | {f"{at}.eh_proj.weight": torch.cat(projection, 1)}


class HeadByDefinition:
    """A head in float32, without a cache: every pass computes all positions again."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        at, tensors = f"model.layers.{self.config['num_hidden_layers']}.", load_file(directory / "model.safetensors")
        self.weights = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
        self.weights.setdefault("embed_tokens.weight", tensors["model.embed_tokens.weight"])
        self.weights.setdefault("shared_head.head.weight", tensors["lm_head.weight"])

    def draft(self, states: Tensor, following: list[int], length: int) -> list[int]:
        """Return a draft.

        `states`: the target's normed hidden states of all positions. `following`: the token after each."""
        hidden, tokens, draft = states, list(following), []
        for _ in range(length):
            embedded = self.norm(self.weights["embed_tokens.weight"][tokens], "enorm")
            x = self.linear(torch.cat([embedded, self.norm(hidden, "hnorm")], -1), "eh_proj")
            inner = self.norm(x, "input_layernorm")
            x = x + (self.attend_to_latents(inner) if "kv_lora_rank" in self.config else self.attend(inner))
            network = self.mix_experts if "mlp.gate.weight" in self.weights else partial(self.run_expert, name="mlp")
            x = x + network(self.norm(x, "post_attention_layernorm"))
            last = self.norm(x[-1:], "shared_head.norm")
            draft.append(int(self.linear(last, "shared_head.head").argmax()))
            tokens.append(draft[-1])
            hidden = torch.cat([hidden, last])
        return draft

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        eps = self.config["rms_norm_eps"] if eps is None else eps
        normed: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.weights[f"{name}.weight"]
        return normed

    def rotate(self, x: Tensor, *, interleaved: bool) -> Tensor:  # [T, heads, rotated elements]
        theta = (self.config.get("rope_parameters") or self.config)["rope_theta"]
        angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        pairs = x.unflatten(-1, (-1, 2) if interleaved else (2, -1))
        pairs = pairs if interleaved else pairs.transpose(-1, -2)
        return torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn).flatten(-2)

    def attend(self, x: Tensor) -> Tensor:
        """Grouped-query attention of GLM-4.5. The rotated pairs are in another order, in queries and keys alike."""
        c, dim = self.config, self.config["head_dim"]
        q, k, v = (self.linear(x, f"self_attn.{name}_proj").unflatten(1, (-1, dim)) for name in "qkv")
        if c.get("use_qk_norm"):
            q, k = self.norm(q, "self_attn.q_norm"), self.norm(k, "self_attn.k_norm")
        part = int(dim * c["partial_rotary_factor"])
        q, k = (torch.cat([self.rotate(y[..., :part], interleaved=False), y[..., part:]], -1) for y in (q, k))
        repeats = c["num_attention_heads"] // c["num_key_value_heads"]
        return self.project(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))

    def attend_to_latents(self, x: Tensor) -> Tensor:
        """Multi-head latent attention of DeepSeek V3, with keys and values of every head."""
        c, plain, rank = self.config, self.config["qk_nope_head_dim"], self.config["kv_lora_rank"]
        heads = c["num_attention_heads"]
        q = self.norm(self.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", 1e-6)
        q = self.linear(q, "self_attn.q_b_proj").unflatten(1, (heads, -1))
        latent, rotary = self.linear(x, "self_attn.kv_a_proj_with_mqa").split([rank, c["qk_rope_head_dim"]], 1)
        pairs = self.linear(self.norm(latent, "self_attn.kv_a_layernorm", 1e-6), "self_attn.kv_b_proj")
        k, v = pairs.unflatten(1, (heads, -1)).split([plain, c["v_head_dim"]], -1)
        turned = self.rotate(rotary[:, None], interleaved=True).expand(-1, heads, -1)
        q = torch.cat([q[..., :plain], self.rotate(q[..., plain:], interleaved=True)], -1)
        return self.project(q, torch.cat([k, turned], -1), v)

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of causal attention, all [T, heads, elements]."""
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), -torch.inf)
        return self.linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1), "self_attn.o_proj")

    def mix_experts(self, x: Tensor) -> Tensor:
        c = self.config
        scores = self.linear(x, "mlp.gate").sigmoid()
        choice = scores + self.weights["mlp.gate.e_score_correction_bias"]
        groups = choice.unflatten(1, (c["n_group"], -1))
        best = groups.topk(2, -1).values.sum(-1).topk(c["topk_group"], -1).indices
        allowed = torch.zeros(groups.shape[:2]).scatter(1, best, 1.0)[..., None].expand_as(groups).flatten(1) > 0
        chosen = choice.masked_fill(~allowed, -torch.inf).topk(c["num_experts_per_tok"], -1).indices
        factors = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        if c["norm_topk_prob"]:
            factors = factors / factors.sum(-1, keepdim=True)
        out = self.run_expert(x, "mlp.shared_experts")
        for expert in range(scores.shape[1]):
            weight = factors[:, expert : expert + 1] * c["routed_scaling_factor"]
            out = out + self.run_expert(x, f"mlp.experts.{expert}") * weight
        return out

    def run_expert(self, x: Tensor, name: str) -> Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(F.silu(gate) * up, f"{name}.down_proj")
