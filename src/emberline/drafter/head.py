"""TrainableHead: an EAGLE-3 head in torch, one decoder layer that drafts tokens from hidden states of the target model.

In the first pass, position i gets the target's hidden states at i and the embedding of token i + 1, and predicts token
i + 2. Each later pass predicts one token more: it gets the output of the pass before in place of hidden states.

Training computes all passes for every position at once. Row i of every pass belongs to the draft that starts at
position i. Pass j of that draft is at position i + j. It attends to the first pass's keys of positions 0 to i, which
come from the target's hidden states, and to the draft's own keys of passes 1 to j. Drafting token by token with a
growing cache computes the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emberline.drafter.head_config import HeadConfig

OUTPUT_INIT_SCALE = 0.2  # of the matrices that add to the residual, so that training starts near the identity


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class PassCache:
    """The rotated keys and the values of the passes so far, each [batch, rows, kv_heads, head_dim]."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


class HeadAttention(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden, q, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden, kv, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, config.hidden, bias=False)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: PassCache) -> Tensor:
        """Return the attention of one pass over x [batch, rows, 2 hidden], and add its keys and values to the cache."""
        batch, rows, _ = x.shape
        kv_heads, dim = self.config.kv_heads, self.config.head_dim
        group = self.config.heads // kv_heads
        q = _rotate(self.q_proj(x).view(batch, rows, kv_heads * group, dim), cos_sin)
        cache.keys.append(_rotate(self.k_proj(x).view(batch, rows, kv_heads, dim), cos_sin))
        cache.values.append(self.v_proj(x).view(batch, rows, kv_heads, dim))
        q = q.view(batch, rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4) * dim**-0.5
        keys = [k.transpose(1, 2)[:, :, None] for k in cache.keys]  # [batch, kv heads, 1, rows, dim]
        values = [v.transpose(1, 2)[:, :, None] for v in cache.values]
        is_later = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
        scores = [(q @ keys[0].transpose(-1, -2)).float().masked_fill(is_later, -torch.inf)]
        scores += [(q * k).sum(-1, keepdim=True).float() for k in keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1).to(values[0].dtype)
        mixed = weights[..., :rows] @ values[0]
        for number, v in enumerate(values[1:]):
            mixed = mixed + weights[..., rows + number, None] * v
        out: Tensor = self.o_proj(mixed.permute(0, 3, 1, 2, 4).reshape(batch, rows, -1))
        return out


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class HeadLayer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden, config.norm_eps)
        self.self_attn = HeadAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = GatedMLP(config.hidden, config.ffn)

    def forward(self, g: Tensor, embedded: Tensor, cos_sin: tuple[Tensor, Tensor], cache: PassCache) -> Tensor:
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], -1)
        x = g + self.self_attn(x, cos_sin, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TrainableHead(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.layer_ids) * config.hidden, config.hidden, bias=False)
        self.midlayer = HeadLayer(config)
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)

    def initialize(self, seed: int, input_rms: Tensor, output_rows: Tensor, output_norm: Tensor) -> None:
        """Set the weights with which training starts.

        `input_rms`: root mean square of each of the target's hidden states, by which the columns of `fc` are divided,
        because the states of different layers differ in size. `output_rows`, `output_norm`: the target's own LM head
        for the draft vocabulary, and its norm, which is scaled so that the first logits have a variance of 1."""
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() == 2:
                    scale = OUTPUT_INIT_SCALE if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                    noise = torch.randn(weight.shape, generator=random)
                    weight.copy_(noise * (scale * weight.shape[1] ** -0.5))
            self.fc.weight.div_(input_rms.to(self.fc.weight.device).clamp_min(1e-6))
            self.lm_head.weight.copy_(output_rows)
            variance = (self.lm_head.weight * output_norm).square().sum(1).mean()
            self.norm.weight.copy_(output_norm * torch.rsqrt(variance))

    def unroll(self, hidden: Tensor, embedded: Tensor, passes: int) -> list[Tensor]:
        """Return the output of each pass, [batch, rows, hidden], before the norm.

        `hidden`: the target's hidden states [batch, rows, 3 hidden]. `embedded`: the embeddings of the tokens at the
        same positions. Beyond the end of a sequence, embeddings are zeros and outputs are meaningless."""
        rows = hidden.shape[1]
        padded = F.pad(embedded, (0, 0, 0, passes))
        cos_sin = self._rotary_table(rows + passes, hidden.device)
        g, cache, outputs = self.fc(hidden).float(), PassCache(), []
        for number in range(passes):
            at_pass = cos_sin[0][number : number + rows], cos_sin[1][number : number + rows]
            g = self.midlayer(g, padded[:, 1 + number : 1 + number + rows], at_pass, cache)
            outputs.append(g)
        return outputs

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits over the draft vocabulary, from outputs of a pass."""
        out: Tensor = self.lm_head(self.norm(x))
        return out

    def _rotary_table(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [positions, 1, head_dim / 2]."""
        dim = self.config.head_dim
        frequencies = 1.0 / self.config.rope_theta ** (torch.arange(0, dim, 2, device=device) / dim)
        angles = (torch.arange(positions, device=device)[:, None] * frequencies)[:, None]
        return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Return x [batch, rows, heads, dim] rotated by the angles of its rows' positions."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos_sin
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
