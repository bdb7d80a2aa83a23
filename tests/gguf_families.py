"""Checkpoints written as GGUF files the way llama.cpp converts them, with the gguf package's own table of names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import ggufs
import numpy as np
import torch
from tiny import Config
from torch import Tensor

PERMUTED = ("granite", "granitemoe", "smollm3")  # the rows of queries and keys are reordered
Q8_0 = gguf.GGMLQuantizationType.Q8_0
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def rename(arch: str, config: Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as llama.cpp names, splits and orders them."""
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(kind, config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0))
    out: dict[str, Tensor] = {}
    for name, tensor in stack_experts(tensors):
        for part, value in split(arch, config, name, tensor):
            stem, _, suffix = part.rpartition(".")
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(stem.rpartition(".")[2])
            if arch in PERMUTED and heads is not None:
                value = torch.from_numpy(ggufs.llama_cpp_order(value.numpy(), config[heads]))
            if arch == "gemma2" and part.endswith("norm.weight"):
                value = value + 1
            found = table.get_name(stem)
            assert found is not None, f"{part} has no name in {arch}"
            out[f"{found}.{suffix}"] = value
    return out


def stack_experts(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if expert := EXPERT.fullmatch(name):
            experts.setdefault(f"{expert[1]}.{expert[3]}.weight", []).append(tensor)
        else:
            yield name, tensor
    yield from ((name, torch.stack(parts)) for name, parts in experts.items())


def split(arch: str, config: Config, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return what a tensor becomes, before names are translated."""
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("_bias", ".bias"), tensor)]
    if name.endswith("shared_expert_gate.weight"):
        return [(name, tensor.squeeze())]
    if name.endswith("sinks"):
        return [(f"{name}.weight", tensor)]
    if name.endswith("input_linear.weight"):
        names = (name.replace("input_linear", f"experts.{part}").replace("block_sparse_moe", "mlp") for part in GATE_UP)
        return list(zip(names, tensor.chunk(2, dim=-2), strict=True))
    if name.endswith("kv_b_proj.weight") and arch == "deepseek2":
        nope, heads = config["qk_nope_head_dim"], config["num_attention_heads"]
        keys, values = tensor.view(heads, -1, tensor.shape[1]).split([nope, config["v_head_dim"]], dim=1)
        names = (name.replace("kv_b_proj", part) for part in ("k_b_proj", "v_b_proj"))
        return list(zip(names, (keys.transpose(1, 2), values), strict=True))
    if "experts" in name and not name.endswith(".weight"):  # Llama 4 and gpt-oss: of all experts, and transposed
        return split_fused(arch, name, tensor)
    return [(name, tensor)]


GATE_UP = ("gate_proj", "up_proj")


def split_fused(arch: str, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    is_bias = name.endswith("_bias")
    name, suffix = name.removesuffix("_bias"), "bias" if is_bias else "weight"
    value = tensor if is_bias else tensor.transpose(1, 2)
    if name.endswith("down_proj"):
        return [(f"{name}.{suffix}", value)]
    halves = value.chunk(2, dim=1) if arch == "llama4" else (value[:, ::2], value[:, 1::2])
    names = (f"{name.replace('gate_up_proj', part)}.{suffix}" for part in GATE_UP)
    return list(zip(names, halves, strict=True))


Writer = Any  # gguf.GGUFWriter
FIELDS: dict[str, Callable[[Writer], Callable[[Any], None]]] = {
    "max_position_embeddings": lambda w: w.add_context_length,
    "hidden_size": lambda w: w.add_embedding_length,
    "num_attention_heads": lambda w: w.add_head_count,
    "rope_theta": lambda w: w.add_rope_freq_base,
    "rms_norm_eps": lambda w: w.add_layer_norm_rms_eps,
    "layer_norm_eps": lambda w: w.add_layer_norm_eps,
    "sliding_window": lambda w: w.add_sliding_window,
    "attn_logit_softcapping": lambda w: w.add_attn_logit_softcapping,
    "final_logit_softcapping": lambda w: w.add_final_logit_softcapping,
    "attention_multiplier": lambda w: w.add_attention_scale,
    "embedding_multiplier": lambda w: w.add_embedding_scale,
    "residual_multiplier": lambda w: w.add_residual_scale,
    "logits_scaling": lambda w: w.add_logit_scale,
    "logit_scale": lambda w: w.add_logit_scale,
    "num_experts": lambda w: w.add_expert_count,
    "num_local_experts": lambda w: w.add_expert_count,
    "n_routed_experts": lambda w: w.add_expert_count,
    "num_experts_per_tok": lambda w: w.add_expert_used_count,
    "n_shared_experts": lambda w: w.add_expert_shared_count,
    "moe_intermediate_size": lambda w: w.add_expert_feed_forward_length,
    "shared_expert_intermediate_size": lambda w: w.add_expert_shared_feed_forward_length,
    "first_k_dense_replace": lambda w: w.add_leading_dense_block_count,
    "routed_scaling_factor": lambda w: w.add_expert_weights_scale,
    "norm_topk_prob": lambda w: w.add_expert_weights_norm,
    "n_group": lambda w: w.add_expert_group_count,
    "topk_group": lambda w: w.add_expert_group_used_count,
    "q_lora_rank": lambda w: w.add_q_lora_rank,
    "kv_lora_rank": lambda w: w.add_kv_lora_rank,
    "interleave_moe_layer_step": lambda w: w.add_interleave_moe_layer_step,
    "num_nextn_predict_layers": lambda w: w.add_nextn_predict_layers,
}


def write(
    path: Path,
    arch: str,
    config: Config,
    tensors: dict[str, Tensor],
    extra: dict[str, Any] | None = None,
    quantised: tuple[str, ...] = (),
) -> Path:
    """Write a checkpoint's tensors as llama.cpp's converter does, in float32, and some in Q8_0.

    `extra`: other metadata. `quantised`: names of tensors in a layer.
    """
    w = gguf.GGUFWriter(path, arch)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for name, add in FIELDS.items():
        if (value := config.get(name, rope.get(name))) is not None:
            add(w)(value)
    w.add_block_count(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0))
    w.add_head_count_kv(1 if arch == "deepseek2" else config["num_key_value_heads"])
    ffn = config["intermediate_size"]
    w.add_feed_forward_length(config["intermediate_size_mlp"] if arch == "llama4" else ffn)
    if arch in ("llama4", "gpt-oss"):
        w.add_expert_feed_forward_length(ffn)
    add_head_sizes(w, arch, config)
    add_rope(w, arch, config, rope)
    tokens = ["<|pad|>", "<|start|>", *ggufs.ALPHABET[: config["vocab_size"] - 2]]
    w.add_tokenizer_model("gpt2")
    w.add_token_list(tokens)
    w.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        add = {str: w.add_string, bool: w.add_bool, int: w.add_uint32}[type(value)]
        key = key if key.startswith("tokenizer.") else f"{arch}.{key}"
        w.kv_data[0].pop(key, None)
        add(key, value)
    for name, tensor in rename(arch, config, tensors).items():
        values = np.ascontiguousarray(tensor.numpy())
        if name.split(".")[-2] in quantised:
            w.add_tensor(name, gguf.quants.quantize(values, Q8_0), raw_dtype=Q8_0)
        else:
            w.add_tensor(name, values)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def add_head_sizes(w: Writer, arch: str, config: Config) -> None:
    usual = config["hidden_size"] // config["num_attention_heads"]
    if arch == "deepseek2":
        rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
        w.add_key_length(rank + rotated)
        w.add_value_length(rank)
        w.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
        w.add_value_length_mla(config["v_head_dim"])
        w.add_rope_dimension_count(rotated)
        sigmoid = config["model_type"] == "deepseek_v3"
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    elif arch == "phi3":
        w.add_rope_dimension_count(int(config.get("partial_rotary_factor", 1.0) * usual))
    else:
        head_dim = config.get("head_dim", usual)
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
        w.add_rope_dimension_count(int(head_dim * (config["partial_rotary_factor"] if arch == "glm4moe" else 1)))
    if arch in ("glm4moe", "dots1"):
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def add_rope(w: Writer, arch: str, config: Config, rope: Config) -> None:
    if config["model_type"] == "olmo3":
        w.add_sliding_window_pattern([(layer + 1) % 4 != 0 for layer in range(config["num_hidden_layers"])])
    if arch == "phi3":
        original = config["original_max_position_embeddings"]
        w.add_rope_scaling_orig_ctx_len(original)
        if rope:
            ratio = np.log(config["max_position_embeddings"] / original)
            w.add_rope_scaling_attn_factors(float(np.sqrt(1 + ratio / np.log(original))))
            for kind in ("long", "short"):
                w.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    elif rope.get("rope_type") == "llama3":  # with equal limits, as in Llama 4 Scout
        dim = config["head_dim"]
        wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
        is_kept = wavelengths < rope["original_max_position_embeddings"]
        w.add_tensor("rope_freqs.weight", np.where(is_kept, 1, rope["factor"]).astype(np.float32))
    elif rope.get("rope_type") == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                getattr(w, f"add_rope_scaling_yarn_{name}")(rope[name])
        if "mscale_all_dim" in rope:
            w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
