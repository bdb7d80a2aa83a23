"""SinkModel: a tiny model with the attention of gpt-oss, but without its experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from emberline.hub.checkpoint import Checkpoint
from emberline.models.attention_parts import AttentionParts
from emberline.models.config import ModelConfig


class SinkModel:
    """A Llama with attention sinks and windows on every second layer, as gpt-oss has, but without experts."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        config = tiny.config("llama", num_hidden_layers=4, attention_bias=True)
        self.tensors = tiny.tensors(config)
        for layer in range(4):
            self.tensors[f"model.layers.{layer}.mlp.down_proj.weight"].zero_()
            self.tensors[f"model.layers.{layer}.self_attn.sinks"] = torch.randn(6, generator=torch.manual_seed(layer))
        self.tensors = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        plain = ModelConfig.from_hf(config)
        parts = replace(plain.parts, attention=AttentionParts(has_sinks=True))
        self.config = replace(plain, windows=(7, 0, 7, 0), parts=parts)
        self.checkpoint = Checkpoint.open(tiny.write_tensors(directory, config, self.tensors))

    def compute_gpt_oss_logits(self, tokens: list[list[int]]) -> list[Tensor]:
        """Return the logits of transformers' model whose experts are all zero."""
        transformers = pytest.importorskip("transformers")
        config = transformers.GptOssConfig(
            **tiny.BASE | {"num_hidden_layers": 4, "rope_theta": None},
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=7,
            rope_parameters={"rope_type": "default", "rope_theta": tiny.BASE["rope_theta"]},
            attn_implementation="eager",
        )
        model = transformers.GptOssForCausalLM(config).eval()
        state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        model.load_state_dict(state | {name: self.tensors[name] for name in state if name in self.tensors})
        with torch.inference_mode():
            return [model(torch.tensor([ids])).logits[0] for ids in tokens]
