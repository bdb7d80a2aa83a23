"""Weights on a GPU: every tensor in its place, buffers reused under copies, and memory that sleep really gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from emberline.core.errors import ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.models.device_weights import DeviceWeights
from emberline.models.pinned import host_bytes, pin, unpin
from emberline.models.reader import Reader, files_of
from emberline.models.sleep import sleep
from emberline.models.weights import Weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDE = {**tiny.CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 1424, "vocab_size": 4099, "head_dim": 64}


def taken(weights: Weights, config: dict[str, Any]) -> dict[str, Tensor]:
    hidden, ffn, out = config["hidden_size"], config["intermediate_size"], {}
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        qkv = [(f"{at}.self_attn.{name}_proj.weight", rows) for name, rows in (("q", q), ("k", kv), ("v", kv))]
        out[f"{at}.qkv"] = weights.stack(qkv, hidden)
        out[f"{at}.o"] = weights.matrix(f"{at}.self_attn.o_proj.weight", hidden, q)
        gate_up = [(f"{at}.mlp.{name}_proj.weight", ffn) for name in ("gate", "up")]
        out[f"{at}.gate_up"] = weights.stack(gate_up, hidden, gated=True)
        out[f"{at}.down"] = weights.matrix(f"{at}.mlp.down_proj.weight", hidden, ffn)
        norms = [(f"{at}.{name}.weight", hidden) for name in ("input_layernorm", "post_attention_layernorm")]
        out[f"{at}.norms"] = weights.stack_vectors(norms)
    out["embedding"] = weights.table("model.embed_tokens.weight", config["vocab_size"], hidden)
    out["head"] = weights.matrix("lm_head.weight", config["vocab_size"], hidden)
    out["norm"] = weights.vector("model.norm.weight", hidden)
    return out


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody fills reads as NaN, or as bytes of ones."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("file", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_same_values_as_from_mapped_files(file: torch.dtype, dtype: torch.dtype | None, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path, WIDE, dtype=file, shards=3, seed=7))
    plain = Weights(checkpoint, dtype)
    expected = taken(plain, WIDE)
    for options in ({"piece": 4096 * 5, "ring": 2, "ahead": 1 << 20}, {"piece": 1 << 20, "ring": 4, "ahead": 0}, {}):
        placed = DeviceWeights(checkpoint, dtype, "cuda", Reader.start(files_of(checkpoint), **options))
        found = taken(placed, WIDE)
        placed.finish("")
        assert placed.taken_bytes == plain.taken_bytes
        assert placed.times is not None and placed.times.read.bytes == sum(
            f.stat().st_size for f in files_of(checkpoint)
        )
        for name, tensor in found.items():
            wanted = expected[name]
            if name.endswith("gate_up"):
                gate, up = wanted.view(2, -1, 16, WIDE["hidden_size"])
                wanted = torch.stack([gate, up], dim=1).reshape(wanted.shape)
            assert tensor.is_cuda and tensor.is_contiguous() and tensor.dtype == wanted.dtype
            assert torch.equal(tensor.cpu(), wanted), name


def test_a_file_cut_while_it_is_loaded(tmp_path: Path) -> None:
    """The buffers are unpinned all the same: another load works."""
    for cut in (True, False):
        checkpoint = Checkpoint.open(tiny.write(tmp_path / str(cut), WIDE))
        placed = DeviceWeights(checkpoint, None, "cuda")
        taken(placed, WIDE)
        if cut:
            with (tmp_path / str(cut) / "model.safetensors").open("r+b") as f:
                f.truncate(1 << 20)
            with pytest.raises(ModelFileError, match="does not hold all"):
                placed.finish("")
        else:
            placed.finish("")


def test_pinned_pages() -> None:
    memory = host_bytes(5_000_001)
    assert not memory.is_pinned()
    pin(memory)
    assert memory.is_pinned()
    unpin(memory)
    assert not memory.is_pinned()


def test_sleep_gives_the_memory_back() -> None:
    torch.cuda.empty_cache()
    whole = torch.randn(64 << 20, device="cuda")
    part, narrow = whole[1000:2000], torch.randn(32 << 20, device="cuda").to(torch.bfloat16)
    before = [t.cpu() for t in (whole, part, narrow)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    slept = sleep([part, narrow])
    asleep, _ = torch.cuda.mem_get_info()
    assert slept.nbytes == whole.nbytes + narrow.nbytes
    assert asleep - free >= slept.nbytes
    stranger = torch.full((1 << 20,), float("nan"), device="cuda")  # may take the old address
    slept.wake()
    assert stranger.isnan().all()
    for now, then in zip((whole, part, narrow), before, strict=True):
        assert torch.equal(now.cpu(), then)
    whole.fill_(2.0)
    assert (part == 2).all()
