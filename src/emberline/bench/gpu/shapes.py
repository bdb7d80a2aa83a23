"""The shapes of models that GPU benchmarks run with random weights, and vLLM's figures for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from emberline.bench.gpu.model import LLAMA_8B
from emberline.core.errors import InvalidRequest

DEFAULT_SHAPE = "llama-3.1-8b"
# How rows select experts. "random": routers have random weights, which spreads rows over all experts. "tied": all
# scores are equal, so that every row selects the same experts. This happens in vLLM with dummy weights of
# DeepSeek-V2-Lite, where a softmax in bfloat16 rounds all 64 scores to 1/64.
ROUTINGS = ("random", "tied")
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "use_sliding_window": False,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}

QWEN3_5_35B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 248044,
    "eos_token_id": 248044,
}


@dataclass(frozen=True, slots=True)
class BenchShape:
    hf_config: Mapping[str, Any]  # config.json
    prompt_vocab: int  # prompts contain only ids below it, so no special tokens
    vllm_figures: Mapping[str, float] = field(default_factory=dict)  # by the name of the result
    vllm_routing: str = "random"  # how rows select experts with vLLM's dummy weights
    vllm_narrow_figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by the setting `weights`

    def with_weights(self, weights: str) -> BenchShape:
        """Return the shape with vLLM's figures for this format of weights, if there are separate figures for it."""
        return replace(self, vllm_figures=self.vllm_narrow_figures.get(weights, self.vllm_figures))

    def with_routing(self, routing: str) -> BenchShape:
        """Return the shape, without vLLM's figures of decode steps if they were measured with another routing.

        Decode steps that read fewer experts are faster. Prompts need the same operations with either routing.
        """
        if routing == self.vllm_routing:
            return self
        others = {name: figure for name, figure in self.vllm_figures.items() if not name.startswith("decode")}
        return replace(self, vllm_figures=others)


SHAPES = {
    # vLLM 0.24.0 (FA3, torch.compile, CUDA graphs)
    DEFAULT_SHAPE: BenchShape(
        LLAMA_8B,
        128_000,
        {
            "decode_b1_ms": 4.93,
            "decode_b8_ms": 5.13,
            "decode_b32_ms": 5.87,
            "decode_b64_ms": 6.84,
            "decode_b128_ms": 8.89,
            "decode_b256_ms": 14.4,
            "prefill_2048_ms": 50.9,
            "prefill_8192_ms": 217.0,
            "prefill_30000_ms": 1065.0,
            "chat1000_out_tok_s": 11_120.0,
        },
        # vLLM 0.26.0, float8 weights with dynamic activations
        vllm_narrow_figures={
            "fp8": {
                "decode_b1_ms": 3.54,
                "decode_b8_ms": 3.72,
                "decode_b32_ms": 4.87,
                "decode_b64_ms": 5.19,
                "decode_b256_ms": 12.0,
                "prefill_2048_ms": 32.4,
                "prefill_8192_ms": 144.0,
                "chat1000_out_tok_s": 13_770.0,
            },
        },
    ),
    # vLLM 0.26.0
    "qwen3-30b-a3b": BenchShape(
        QWEN3_30B_A3B,
        100_000,
        {
            "decode_b1_ms": 4.16,
            "decode_b8_ms": 9.20,
            "decode_b32_ms": 16.6,
            "decode_b64_ms": 18.4,
            "decode_b256_ms": 23.5,
            "prefill_2048_ms": 82.0,
            "prefill_8192_ms": 155.0,
            "chat1000_out_tok_s": 5370.0,
        },
    ),
    "deepseek-v2-lite": BenchShape(
        DEEPSEEK_V2_LITE,
        100_000,
        {
            "decode_b1_ms": 3.43,
            "decode_b8_ms": 3.87,
            "decode_b32_ms": 4.68,
            "decode_b64_ms": 5.19,
            "prefill_2048_ms": 54.6,
            "prefill_8192_ms": 102.0,
        },
        vllm_routing="tied",
    ),
    "qwen3.5-35b-a3b": BenchShape(QWEN3_5_35B_A3B, 100_000),
}


def find_shape(name: str) -> BenchShape:
    """Return the shape of this name. Raises InvalidRequest if there is none."""
    if name not in SHAPES:
        raise InvalidRequest(f"shape is {name[:80]!r}; it must be one of {', '.join(SHAPES)}", param="shape")
    return SHAPES[name]


def find_routing(settings: Mapping[str, Any]) -> str:
    """Return the setting `routing`, "random" by default. Raises InvalidRequest if it has another value."""
    routing = str(settings.get("routing", ROUTINGS[0]))
    if routing not in ROUTINGS:
        raise InvalidRequest(f"routing is {routing[:80]!r}; it must be one of {', '.join(ROUTINGS)}", param="routing")
    return routing


def shape_of(settings: Mapping[str, Any]) -> BenchShape:
    """Return the shape that the settings name, Llama 3.1 8B by default.

    It has vLLM's figures for the same routing and format of weights."""
    shape = find_shape(str(settings.get("shape", DEFAULT_SHAPE)))
    return shape.with_routing(find_routing(settings)).with_weights(str(settings.get("weights", "")))
