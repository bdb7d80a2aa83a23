"""Models of every family whose sizes several ranks can divide, and their logits on groups of threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import tiny_deepseek
import tiny_delta
import tiny_experts
import tiny_families
import tiny_fused_experts
import torch
from paged_model import Cache, prompts
from torch import Tensor

from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.comm.thread_group import ThreadGroup
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.shard import Shard
from emberline.models.tensor_names import ignorable_tensors, load_model
from emberline.models.weight_form import WeightForm
from emberline.models.weights import StackSource, Weights

CONTEXT = 64
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
WIDE = HEADS | {"hidden_size": 64, "head_dim": None}  # whose head size follows from the hidden size
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
DELTA = HEADS | {"num_hidden_layers": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
DELTA_SIZES = {"linear_key_head_dim": 12, "linear_value_head_dim": 10}
FULL, SLIDING = "full_attention", "sliding_attention"
WRITERS: dict[str, Callable[[Path], object]] = {}


def add(name: str, family: Any, config: tiny.Config) -> None:
    WRITERS[name] = lambda directory: tiny.write_tensors(directory, config, family.tensors(config))


add("llama", tiny, tiny.config("llama", **HEADS))
add("llama-biased", tiny, tiny.config("llama", **HEADS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
add("mistral", tiny, tiny.config("mistral", **HEADS | {"num_key_value_heads": 4}, sliding_window=7))
add("qwen2", tiny, tiny.config("qwen2", **HEADS))
add("qwen3", tiny, tiny.config("qwen3", **HEADS))
add("mixtral", tiny, tiny.config("mixtral", **HEADS, **EXPERTS))
add(
    "qwen3-moe",
    tiny,
    tiny.config("qwen3_moe", **HEADS, **EXPERTS, moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[1]),
)
add("gemma2", tiny_families, tiny_families.gemma2(**HEADS, attention_bias=True))
add("gemma3", tiny_families, tiny_families.gemma3(**HEADS))
add("phi3", tiny_families, tiny_families.phi3(**HEADS, sliding_window=9))
add("olmo2", tiny_families, tiny_families.config("olmo2", **HEADS, attention_bias=True))
add("olmo3", tiny_families, tiny_families.config("olmo3", **HEADS, sliding_window=7))
add("granite", tiny_families, tiny_families.granite("granite", **HEADS, attention_bias=True, mlp_bias=True))
add("granite4", tiny_families, tiny_families.granite4(**HEADS, layer_types=["attention"] * 2))
add("smollm3", tiny_families, tiny_families.config("smollm3", **HEADS, no_rope_layers=[1, 0]))
add("cohere", tiny_families, tiny_families.cohere("cohere", **WIDE, use_qk_norm=True, attention_bias=True))
add("cohere2", tiny_families, tiny_families.cohere("cohere2", **WIDE, layer_types=[SLIDING, FULL], sliding_window=7))
add("llama4", tiny_families, tiny_families.llama4(**HEADS, no_rope_layers=[1, 0], use_qk_norm=True))
add("qwen2-moe", tiny_experts, tiny_experts.qwen2(**WIDE, num_experts=4))
add("olmoe", tiny_experts, tiny_experts.config("olmoe", **WIDE, num_experts=4))
add("granitemoe", tiny_experts, tiny_experts.granite("granitemoe", **HEADS | {"hidden_size": 64}) | EXPERTS)
add(
    "granitemoeshared",
    tiny_experts,
    tiny_experts.granite("granitemoeshared", **HEADS | {"hidden_size": 64}, shared_intermediate_size=56) | EXPERTS,
)
add("glm4", tiny_experts, tiny_experts.glm4(**HEADS, n_routed_experts=4, attention_bias=True, use_qk_norm=True))
add("solar-open", tiny_experts, tiny_experts.deepseek_like("solar_open", **HEADS, n_group=2, first_k_dense_replace=0))
add("dots1", tiny_experts, tiny_experts.deepseek_like("dots1", **HEADS, scoring_func="noaux_tc"))
LLAMA4 = tiny_fused_experts.CONFIGS["llama4"] | HEADS | {"num_local_experts": 4}
GPT_OSS = tiny_fused_experts.CONFIGS["gpt-oss"] | HEADS | {"num_local_experts": 4, "layer_types": [SLIDING, FULL]}
add("llama4-experts", tiny_fused_experts, LLAMA4)
add("gpt-oss", tiny_fused_experts, GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}})
for name in ("v2", "v2-lite"):
    WRITERS[f"deepseek-{name}"] = partial(tiny_deepseek.write_deepseek, name=name, **DEEPSEEK)
for kind in ("deepseek_v3", "kimi_k2"):
    SPARSE = DEEPSEEK | {"model_type": kind, "first_k_dense_replace": 1, "n_group": 2}
    WRITERS[kind] = partial(tiny_deepseek.write_deepseek, name="v3", **SPARSE)
for name in ("next", "dense", "moe"):
    made = tiny_delta.make_config(name) | DELTA | DELTA_SIZES
    made |= {"num_experts": 4} if "num_experts" in made else {}
    WRITERS[f"delta-{name}"] = partial(tiny_delta.write_random, config=made)


def write_fused(directory: Path) -> None:
    """Write Mixtral with all experts of a layer in two tensors, by rows."""
    config = tiny.config("mixtral", **HEADS, **EXPERTS)
    tiny.write_tensors(directory, config, tiny_experts.fuse(tiny.tensors(config)))


WRITERS["mixtral-fused"] = write_fused


def load_rank(directory: Path, shard: Shard, comm: Any = None, **options: Any) -> DecoderModel:
    return finish_load(open_weights(directory, shard, comm, **options))


def open_weights(
    directory: Path,
    shard: Shard,
    comm: Any = None,
    *,
    dtype: torch.dtype | None = torch.float32,
    form: WeightForm = "plain",
) -> Weights:
    return Weights(Checkpoint.open(directory), dtype, shard=shard, comm=comm, form=form)


def finish_load(weights: Weights) -> DecoderModel:
    config = ModelConfig.from_hf(weights.checkpoint.config)
    model = load_model(weights.shard.shard_config(config), weights, CONTEXT)
    weights.finish(ignorable_tensors(config))
    return model


def whole_part(name: str, shape: tuple[int, ...]) -> StackSource:
    """Return a tensor as the only part of a stacked one."""
    return StackSource(name, shape, lambda whole: whole)


TOKENS = prompts(17, 9)


def compute_logits(model: DecoderModel) -> Tensor:
    """Return logits of two sequences: of chunks, a chunk without logits, and single tokens."""
    cache = Cache(model, TOKENS)
    steps = [cache.step([9, 4]), cache.step([4, 0], rows=[]), cache.step([2, 3]), cache.step([1, 1])]
    return torch.cat([*steps, cache.step([1, 1])])


def run_ranks(directory: Path, ranks: int, expert_parts: int = 1, **options: Any) -> list[Tensor]:
    """Return the logits of each rank of a group."""

    def run(comm: Any) -> Tensor:
        return compute_logits(load_rank(directory, Shard(comm.rank, ranks, expert_parts), comm, **options))

    return ThreadGroup(ranks, in_turns=True).run(run)


def assert_same(parts: list[Tensor], whole: Tensor, bound: float = 1e-4) -> None:
    assert all(torch.equal(part, parts[0]) for part in parts), "ranks have different logits"
    error = float((parts[0] - whole).abs().max() / whole.abs().max())
    assert error < bound, f"the logits differ by {error}"
    assert torch.equal(parts[0].argmax(1), whole.argmax(1))
