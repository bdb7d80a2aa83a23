"""A model that is stored as GGUF gives the logits of its checkpoint, for each architecture that can be converted."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import ggufs
import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

from emberline.core.errors import ModelFileError
from emberline.hub.convert import convert_gguf
from emberline.models.loader import load_decoder

CONFIGS: dict[str, tuple[str, tiny.Config]] = {
    **{name: ("llama", tiny.CONFIGS[name]) for name in ("llama", "llama-tied-mha", "mistral", "mixtral")},
    **{name: (name, tiny.CONFIGS[name]) for name in ("qwen2", "qwen3")},
    "qwen3-moe": ("qwen3moe", tiny.CONFIGS["qwen3-moe"]),
}
Q8_0 = gguf.GGMLQuantizationType.Q8_0
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def gguf_tensors(arch: str, config: tiny.Config, tensors: dict[str, Tensor], *, merged: bool) -> dict[str, Tensor]:
    """Return the tensors as llama.cpp names and orders them, with the gguf package's own table of names."""
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    out: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if expert := EXPERT.fullmatch(name):
            base = str(table.get_name(f"{expert[1]}.{expert[3]}"))
            experts.setdefault(f"{base}.weight", []).append(tensor)
            continue
        stem, _, suffix = name.rpartition(".")
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(stem.rpartition(".")[2])
        if arch == "llama" and heads is not None:
            tensor = torch.from_numpy(ggufs.llama_cpp_order(tensor.numpy(), config[heads]))
        out[f"{table.get_name(stem)}.{suffix}"] = tensor
    for name, parts in experts.items():
        if merged:
            out[name] = torch.stack(parts)
        else:
            out |= {name.replace("_exps.", f".{i}."): part for i, part in enumerate(parts)}
    return out


def write_gguf(
    path: Path, arch: str, config: tiny.Config, tensors: dict[str, Tensor], quantised: tuple[str, ...] = ()
) -> None:
    """Write the tensors in float32, and those named in `quantised` in Q8_0."""
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(config["head_dim"])
    w.add_rope_freq_base(config["rope_theta"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    optional = {
        "sliding_window": w.add_sliding_window,
        "num_experts_per_tok": w.add_expert_used_count,
        "num_experts": w.add_expert_count,
        "num_local_experts": w.add_expert_count,
        "moe_intermediate_size": w.add_expert_feed_forward_length,
    }
    for key, add in optional.items():
        if config.get(key) is not None:
            add(config[key])
    tokens = ["<|pad|>", "<|start|>", *ggufs.ALPHABET[: config["vocab_size"] - 2]]
    w.add_tokenizer_model("gpt2")
    w.add_token_list(tokens)
    w.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    for name, tensor in tensors.items():
        if name in quantised:
            w.add_tensor(name, gguf.quants.quantize(tensor.numpy(), Q8_0), raw_dtype=Q8_0)
        else:
            w.add_tensor(name, tensor.numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def same_tensors(directory: Path, tensors: dict[str, Tensor]) -> bool:
    found = load_file(directory / "model.safetensors")
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("name", CONFIGS)
def test_converted_model_is_the_same(name: str, tmp_path: Path) -> None:
    arch, config = CONFIGS[name]
    tensors = tiny.tensors(config)
    write_gguf(tmp_path / "m.gguf", arch, config, gguf_tensors(arch, config, tensors, merged=True))
    converted = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert same_tensors(converted, tensors)
    original = load_decoder(tiny.write(tmp_path / "original", config))
    assert load_decoder(converted).config == original.config


def test_files_with_a_tensor_for_each_expert(tmp_path: Path) -> None:
    arch, config = CONFIGS["mixtral"]
    tensors = tiny.tensors(config)
    stored = gguf_tensors(arch, config, tensors, merged=False)
    assert "blk.1.ffn_down.3.weight" in stored
    write_gguf(tmp_path / "m.gguf", arch, config, stored)
    assert same_tensors(convert_gguf(tmp_path / "m.gguf", tmp_path / "out"), tensors)


def test_merged_experts_must_be_matrices(tmp_path: Path) -> None:
    arch, config = CONFIGS["mixtral"]
    stored = gguf_tensors(arch, config, tiny.tensors(config), merged=True)
    stored["blk.0.ffn_up_exps.weight"] = stored["blk.0.ffn_up_exps.weight"].flatten(0, 1)
    write_gguf(tmp_path / "m.gguf", arch, config, stored)
    with pytest.raises(ModelFileError, match=r"ffn_up_exps\.weight' must have three dimensions"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_experts_of_a_quantised_tensor_are_separated(tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["mixtral"], "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4}
    stored = gguf_tensors("llama", config, tiny.tensors(config), merged=True)
    name = "blk.2.ffn_gate_exps.weight"
    write_gguf(tmp_path / "m.gguf", "llama", config, stored, quantised=(name,))
    found = load_file(convert_gguf(tmp_path / "m.gguf", tmp_path / "out") / "model.safetensors")
    exact = gguf.quants.dequantize(gguf.quants.quantize(stored[name].numpy(), Q8_0), Q8_0)
    for expert, values in enumerate(torch.from_numpy(exact).bfloat16()):
        assert torch.equal(found[f"model.layers.2.block_sparse_moe.experts.{expert}.w1.weight"], values)
