"""write_tiny_checkpoint: a random Llama of a few layers, whose steps take about a millisecond on a CPU.

It has the tokenizer of a real model, so that workers can serve it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS = 64, 128, 2, 4, 2
VOCAB = 4096  # the first tokens of the tokenizer
# The first tokens of byte-level tokenizers are special tokens and single bytes. A reply must not have any, since a
# client would not get an event for each of them.
NO_TEXT_TOKENS = 512
MAX_CONTEXT = 2048
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_tiny_checkpoint(directory: Path, tokenizer_dir: Path) -> Path:
    """Write the checkpoint with the tokenizer of another checkpoint, and return its directory."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_dir / name, directory / name)
    save_file(_random_tensors(), directory / "model.safetensors")
    return directory


def _random_tensors() -> dict[str, np.ndarray]:
    rng, kv = np.random.default_rng(0), HIDDEN // HEADS * KV_HEADS

    def matrix(rows: int, columns: int) -> np.ndarray:
        values: np.ndarray = (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        return values

    head = matrix(VOCAB, HIDDEN)
    head[:NO_TEXT_TOKENS] = 0.0  # the largest logit of the others is above 0
    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": head}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.{name}.weight": np.ones(HIDDEN, np.float32) for name in _NORMS}
        tensors |= {
            f"{at}.self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{at}.self_attn.k_proj.weight": matrix(kv, HIDDEN),
            f"{at}.self_attn.v_proj.weight": matrix(kv, HIDDEN),
            f"{at}.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{at}.mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(FFN, HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(HIDDEN, FFN),
        }
    return tensors


_NORMS = ("input_layernorm", "post_attention_layernorm")
