"""Random heads for multi-token prediction of Qwen3-Next and Qwen3.5, and their meaning."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import tiny_delta
import torch


class GatedHead:
    """A random head for multi-token prediction of Qwen3-Next or Qwen3.5, whose layer is one of transformers."""

    def __init__(self, model: Any, seed: int = 7) -> None:
        """`model`: the target model, with which it shares embedding and output head."""
        self.model, text = model, model.model
        self.layer = copy.deepcopy(text.layers[model.config.layer_types.index(tiny_delta.FULL)])
        tiny_delta.randomize(self.layer)
        hidden, random = model.config.hidden_size, torch.Generator().manual_seed(seed)
        self.tensors = {"mtp.fc.weight": torch.randn(hidden, 2 * hidden, generator=random) / hidden**0.5}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.tensors[f"mtp.{name}.weight"] = 0.2 * torch.randn(hidden, generator=random)
        self.tensors |= {f"mtp.layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}

    def compute_states(self, tokens: list[int]) -> torch.Tensor:
        """Return the target's hidden states of all positions, behind its final norm.

        States of its recurrent layers are computed token by token: the rule for chunks has larger rounding errors."""
        module = sys.modules[type(self.model).__module__]
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)
            states: torch.Tensor = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
        return states

    def split_experts(self) -> dict[str, torch.Tensor]:
        """Return its tensors with names for each expert, as Qwen3-Next checkpoints have them."""
        at, split = "mtp.layers.0.mlp.experts", dict(self.tensors)
        both, down = split.pop(f"{at}.gate_up_proj"), split.pop(f"{at}.down_proj")
        for i in range(len(down)):
            gate, up = both[i].chunk(2)
            for name, tensor in (("gate", gate), ("up", up), ("down", down[i])):
                split[f"{at}.{i}.{name}_proj.weight"] = tensor.clone()
        return split

    @torch.inference_mode()
    def draft(self, states: torch.Tensor, following: list[int], length: int) -> list[int]:
        """Return a draft; every pass computes all positions again.

        `states`: the target's normed hidden states of all positions. `following`: the token after each."""
        text, hidden, tokens, draft = self.model.model, states, list(following), []
        for _ in range(length):
            embedded = self._norm(text.embed_tokens.weight[tokens], "pre_fc_norm_embedding")
            both = torch.cat([embedded, self._norm(hidden, "pre_fc_norm_hidden")], -1)
            x, places = (both @ self.tensors["mtp.fc.weight"].T)[None], torch.arange(len(tokens))[None]
            mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf).triu(1)
            out = self.layer(x, position_embeddings=text.rotary_emb(x, places), attention_mask=mask)
            last = self._norm((out[0] if isinstance(out, tuple) else out).view(len(tokens), -1)[-1:], "norm")
            draft.append(int(self.model.lm_head(last).argmax()))
            tokens.append(draft[-1])
            hidden = torch.cat([hidden, last])
        return draft

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        normed: torch.Tensor = x * scale * (1 + self.tensors[f"mtp.{name}.weight"])
        return normed
