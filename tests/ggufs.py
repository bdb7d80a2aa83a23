"""Small GGUF files written by the gguf package itself: one decoder layer or two, any architecture, any tensor type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 2
BYTES = {chr(b): b for b in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
ALPHABET = sorted(BYTES) + [chr(256 + i) for i in range(256 - len(BYTES))]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "e r", "Ġ a"]
BPE_TOKENS = ["<|end|>", "<|start|>", *ALPHABET, *(m.replace(" ", "") for m in MERGES)]


def tensors(arch: str, rng: np.random.Generator, tied: bool = False) -> dict[str, NDArray[np.float32]]:
    vocab = len(BPE_TOKENS)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (vocab, HIDDEN)
    for i in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
        if arch == "qwen2":
            shapes |= {f"blk.{i}.attn_{p}.bias": (block[f"attn_{p}"][0],) for p in "qkv"}
        if arch == "qwen3":
            shapes |= {f"blk.{i}.attn_{p}_norm.weight": (HEAD_DIM,) for p in "qk"}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def llama_cpp_order(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Permute rows of q and k as llama.cpp does for Llama, index by index."""
    dim = len(rows) // heads
    out = np.empty_like(rows)
    for h in range(heads):
        for i in range(dim // 2):
            for half in range(2):
                out[h * dim + 2 * i + half] = rows[h * dim + half * (dim // 2) + i]
    return out


def write(
    path: Path,
    arch: str = "llama",
    quant: str = "F32",
    values: dict[str, NDArray[np.float32]] | None = None,
    extra: dict[str, Any] | None = None,
    tied: bool = False,
    tensors_per_part: int = 0,
    types: dict[str, str] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Returns what was stored, before quantisation.

    `types`: of tensors that have another type than `quant`.
    With `tensors_per_part`, the model is split: the files are called NAME-00001-of-00003.gguf and so on.
    """
    values = values or tensors(arch, np.random.default_rng(7), tied)
    w = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_part)
    w.add_block_count(LAYERS)
    w.add_context_length(128)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(BPE_TOKENS)
    w.add_token_types([3, 3] + [1] * (len(BPE_TOKENS) - 2))
    w.add_token_merges(MERGES)
    w.add_bos_token_id(1)
    w.add_eos_token_id(0)
    for key, value in (extra or {}).items():
        add = {str: w.add_string, bool: w.add_bool, int: w.add_uint32, float: w.add_float32}[type(value)]
        add(f"{arch}.{key}" if not key.startswith("tokenizer.") else key, value)
    for name, value in values.items():
        kind = gguf.GGMLQuantizationType[(types or {}).get(name, quant)]
        if value.ndim == 1 or quant == "F32":
            w.add_tensor(name, value)
        else:
            w.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return values
