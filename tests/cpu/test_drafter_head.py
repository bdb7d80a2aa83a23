"""The EAGLE-3 head: unrolled passes equal drafting token by token, the target's states, and the checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.drafter.checkpoint import read_head, write_head
from emberline.drafter.head import TrainableHead
from emberline.drafter.head_config import HeadConfig, default_draft_vocab, default_layer_ids
from emberline.drafter.target import TargetStates
from emberline.drafter.vocabulary import DraftVocabulary
from emberline.models.config import ModelConfig
from emberline.models.loader import load_decoder

CONFIG = HeadConfig.for_model(ModelConfig.from_hf(tiny.CONFIGS["llama"]), 40)
LENGTH, PASSES = 11, 4


def random_head(seed: int = 0) -> TrainableHead:
    torch.manual_seed(seed)
    head = TrainableHead(CONFIG)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(1 + 0.2 * torch.randn_like(weight) if weight.dim() == 1 else torch.randn_like(weight) * 0.15)
    return head


class StepwiseHead:
    """The head as an engine runs it: one position at a time, with a cache that grows."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean() + CONFIG.norm_eps).sqrt() * self.weights[f"{name}.weight"]

    def project(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"midlayer.{name}_proj.weight"] @ x

    def rotate(self, heads: Tensor, position: int) -> Tensor:
        out = heads.clone()
        half = CONFIG.head_dim // 2
        for pair in range(half):
            angle = torch.tensor(position * CONFIG.rope_theta ** (-2 * pair / CONFIG.head_dim))
            a, b = heads[:, pair], heads[:, pair + half]
            out[:, pair], out[:, pair + half] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return out

    def forward(self, g: Tensor, embedded: Tensor, position: int) -> Tensor:
        """Compute the layer at one position, and add its key and value to the cache."""
        x = torch.cat([self.norm("midlayer.input_layernorm", embedded), self.norm("midlayer.hidden_norm", g)])
        q = self.rotate(self.project("self_attn.q", x).view(CONFIG.heads, -1), position)
        self.keys.append(self.rotate(self.project("self_attn.k", x).view(CONFIG.kv_heads, -1), position))
        self.values.append(self.project("self_attn.v", x).view(CONFIG.kv_heads, -1))
        mixed = []
        for head in range(CONFIG.heads):
            kv = head * CONFIG.kv_heads // CONFIG.heads
            scores = torch.stack([q[head] @ k[kv] for k in self.keys]) * CONFIG.head_dim**-0.5
            mixed.append(sum(p * v[kv] for p, v in zip(scores.softmax(0), self.values, strict=True)))
        x = g + self.project("self_attn.o", torch.cat(mixed))
        inner = self.norm("midlayer.post_attention_layernorm", x)
        gate, up = self.project("mlp.gate", inner), self.project("mlp.up", inner)
        return x + self.project("mlp.down", torch.nn.functional.silu(gate) * up)


def test_unrolled_passes_equal_drafting_token_by_token() -> None:
    head = random_head()
    hidden, embedded = torch.randn(LENGTH, 3 * CONFIG.hidden), torch.randn(LENGTH, CONFIG.hidden)
    # A second, longer row of the batch: padding and neighbours must not matter.
    others = torch.randn(LENGTH, 3 * CONFIG.hidden), torch.randn(LENGTH, CONFIG.hidden)
    batch = torch.stack([hidden, others[0]]), torch.stack([embedded, others[1]])
    with torch.no_grad():
        outputs = head.unroll(*batch, PASSES)
        for root in range(LENGTH - PASSES):
            stepwise = StepwiseHead(dict(head.state_dict()))
            for position in range(root + 1):
                x = stepwise.forward(head.fc.weight @ hidden[position], embedded[position + 1], position)
            for number in range(PASSES):
                if number:
                    x = stepwise.forward(x, embedded[root + 1 + number], root + number)
                torch.testing.assert_close(outputs[number][0, root], x, rtol=1e-4, atol=1e-5)
        expected = head.lm_head.weight @ stepwise.norm("norm", x)
        torch.testing.assert_close(head.logits(outputs[-1][0, LENGTH - PASSES - 1]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer_ids", [(0, 1, 2), (1, 1, 2), (2, 0, 1)])
def test_target_states_are_inputs_of_layers(layer_ids: tuple[int, ...], tmp_path: Path) -> None:
    model = load_decoder(tiny.write(tmp_path), "float32")
    random = np.random.default_rng(0)
    sequences = [random.integers(0, 131, size).astype(np.int32) for size in (5, 40, 1, 23)]
    spans = [range(1, 4), range(10, 39), range(0), range(22, 23)]
    target = TargetStates(model, layer_ids, 64)
    target._forward_tokens = 64  # so that several forward passes are needed
    parts = list(target.compute(sequences, spans))
    assert len(parts) == 2
    hidden, logits = (torch.cat(each) for each in zip(*parts, strict=True))
    assert hidden.shape == (69, 3 * 48) and logits.shape == (33, 131)
    one_by_one = TargetStates(model, (0, 1, 2), 64)
    for ids, span, states in zip(sequences, spans, hidden.split([5, 40, 1, 23]), strict=True):
        ((alone, alone_logits),) = one_by_one.compute([ids], [span])
        by_layer = alone.view(len(ids), 3, 48)
        assert torch.equal(states, by_layer[:, list(layer_ids)].flatten(1))
        assert torch.equal(logits[: len(span)], alone_logits)
        logits = logits[len(span) :]
    embedding = tiny.tensors(tiny.CONFIGS["llama"])["model.embed_tokens.weight"]
    assert torch.equal(by_layer[:, 0], embedding[torch.from_numpy(ids).long()])


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    head, vocabulary = random_head(), DraftVocabulary(np.arange(0, 120, 3), 131)
    write_head(tmp_path, head, vocabulary)
    tensors = load_file(tmp_path / "model.safetensors")
    h, q, kv, ffn = 48, 48, 16, 80
    assert {name: tuple(each.shape) for name, each in tensors.items()} == {
        "fc.weight": (h, 3 * h),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.mlp.gate_proj.weight": (ffn, h),
        "midlayer.mlp.up_proj.weight": (ffn, h),
        "midlayer.mlp.down_proj.weight": (h, ffn),
        "norm.weight": (h,),
        "lm_head.weight": (40, h),
        "d2t": (40,),
        "t2d": (131,),
    }
    assert tensors.pop("d2t").tolist() == [2 * n for n in range(40)]
    assert tensors.pop("t2d").nonzero().flatten().tolist() == list(range(0, 120, 3))
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}
    loaded, ids = read_head(tmp_path)
    assert loaded.config == CONFIG and ids.ids.tolist() == vocabulary.ids.tolist()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, head.state_dict()[name].bfloat16().float())


def test_damaged_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_head(tmp_path)
    write_head(tmp_path, random_head(), DraftVocabulary(np.arange(39), 131))
    with pytest.raises(ModelFileError, match=r"d2t of shape \[40\]"):
        read_head(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelFileError, match="cannot read"):
        read_head(tmp_path)


def test_default_sizes() -> None:
    assert default_layer_ids(30) == (2, 15, 27) and default_layer_ids(7) == (2, 3, 4)
    for layers in range(3, 40):
        ids = default_layer_ids(layers)
        assert 0 <= ids[0] < ids[1] < ids[2] < layers
    with pytest.raises(UnsupportedModel, match="at least 3 layers, not 2"):
        default_layer_ids(2)
    assert [default_draft_vocab(size) for size in (131, 49152, 128256)] == [131, 16384, 32000]
