"""Conversion of Gemma 3 from GGUF: tensor names, norms without the 1 that llama.cpp adds, and config.json."""

from __future__ import annotations

from pathlib import Path

import ggufs
import numpy as np
import pytest
from safetensors.numpy import load_file

from emberline.core.errors import UnsupportedModel
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.convert import convert_gguf
from emberline.models.config import ModelConfig

METADATA = {"attention.sliding_window": 32, "attention.key_length": 16}


def test_gemma3(tmp_path: Path) -> None:
    values = ggufs.tensors("qwen3", np.random.default_rng(3), tied=True)  # with norms of queries and keys
    for layer in range(ggufs.LAYERS):
        for name in ("post_attention_norm", "post_ffw_norm"):
            values[f"blk.{layer}.{name}.weight"] = np.full(ggufs.HIDDEN, 2.5, np.float32)
    ggufs.write(tmp_path / "m.gguf", "gemma3", values=values, extra=METADATA)
    checkpoint = Checkpoint.open(convert_gguf(tmp_path / "m.gguf", tmp_path / "out"))
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    for theirs, ours in (
        ("blk.1.attn_norm", "model.layers.1.input_layernorm"),
        ("blk.1.ffn_norm", "model.layers.1.pre_feedforward_layernorm"),
        ("blk.0.attn_q_norm", "model.layers.0.self_attn.q_norm"),
        ("output_norm", "model.norm"),
        ("blk.0.post_ffw_norm", "model.layers.0.post_feedforward_layernorm"),
        ("blk.0.post_attention_norm", "model.layers.0.post_attention_layernorm"),
    ):
        assert np.array_equal(loaded[f"{ours}.weight"], values[f"{theirs}.weight"] - np.float32(1)), ours
    assert np.array_equal(loaded["model.layers.1.self_attn.q_proj.weight"], values["blk.1.attn_q.weight"])
    config = ModelConfig.from_checkpoint(checkpoint)
    assert (config.model_type, config.windows, config.tie_embeddings) == ("gemma3_text", (32, 32), True)
    assert (config.parts.activation, config.parts.attention_scale) == ("gelu_tanh", 0.25)
    assert config.rope.theta == 10000.0 and checkpoint.config["rope_local_base_freq"] == 10000.0


def test_gemma3_tensor_in_another_architecture(tmp_path: Path) -> None:
    values = ggufs.tensors("llama", np.random.default_rng(3))
    values["blk.0.post_ffw_norm.weight"] = np.ones(ggufs.HIDDEN, np.float32)
    ggufs.write(tmp_path / "m.gguf", "llama", values=values)
    with pytest.raises(UnsupportedModel, match="post_ffw_norm"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
