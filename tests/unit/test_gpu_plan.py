"""plan_gpus: it agrees with the engine's plan for one GPU, and with the published sizes of large models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from emberline.bench import memory_plans
from emberline.bench.gpu.model import LLAMA_8B
from emberline.bench.report import BenchReport
from emberline.cli.__main__ import main
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError, InvalidRequest, ModelError, ModelFileError, UnsupportedModel
from emberline.core.transfer_config import TransferConfig
from emberline.engine.gpu_plan import GPUPlan, GPUSetPlan, plan_gpus
from emberline.engine.gpu_set import GPU_MODELS, GPUSet
from emberline.engine.layout_choice import choose_layout
from emberline.engine.memory import RESERVE_BYTES, plan_engine_memory
from emberline.engine.ranks.layout import Layout
from emberline.models.config import ModelConfig

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
GIB = 1 << 30
SMALL_STEPS = {"max_running": 64, "max_batch_tokens": 2048}


def load(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return config


def make_plan(config: str | dict[str, Any], gpus: str, **settings: Any) -> GPUSetPlan:
    found = load(config) if isinstance(config, str) else config
    return plan_gpus(found, GPUSet.parse(gpus), EngineConfig.build("", **settings).with_gpu_defaults())


def weight_gib(plan: GPUSetPlan | GPUPlan, *formats: str) -> float:
    return sum(w.num_bytes for w in plan.weights if not formats or w.format in formats) / GIB


SLIDING, FULL = "sliding_attention", "full_attention"
COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16"}
GROUPED: dict[str, dict[str, Any]] = {
    "gemma3-12b": {
        **COMMON, "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "vocab_size": 262208,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "max_position_embeddings": 131072, "sliding_window": 1024, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
    },
    "olmo3-7b": {
        **COMMON, "model_type": "olmo3", "rope_theta": 5e5,
        "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 100278,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 4096,
        "max_position_embeddings": 65536, "layer_types": ([SLIDING] * 3 + [FULL]) * 8,
    },
    "command-r7b": {
        **COMMON, "model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 256000,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
        "max_position_embeddings": 132096, "layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window_pattern": 4,
        "rms_norm_eps": None,
    },
}  # fmt: skip


def num_weights(plan: GPUSetPlan | GPUPlan, *kinds: str) -> int:
    return sum(w.num_weights for w in plan.weights if not kinds or w.kind in kinds)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_dtype": "float8"},
        {"weights": "packed"},
        {"weights": "both"},
        {"dtype": "float32"},
        {"max_context": 4096, "max_running": 500, "max_batch_tokens": 1024, "block_size": 16},
        {"kv_memory": 10 * GIB + 1},
        {"kv_host_memory": 1, "transfer": TransferConfig("test")},
    ],
    ids=str,
)
def test_one_gpu_is_planned_as_the_engine_plans_it(settings: dict[str, Any]) -> None:
    engine_settings = EngineConfig.build("", **settings).with_gpu_defaults()
    packed = settings.get("weights") == "packed"
    dtype = settings.get("dtype", "bfloat16")
    expected = plan_engine_memory(
        ModelConfig.from_hf(LLAMA_8B),
        engine_settings,
        GPU_MODELS["H200"].memory_bytes,
        dtype,
        packed=packed,
        kernels="hopper",
    )
    (found,) = make_plan(LLAMA_8B, "H200", **settings).plans
    assert (found.sharing, found.max_context) == ("one GPU", expected.max_context)
    assert found.fixed == {name: getattr(expected, name) for name in found.fixed}
    assert sum(found.fixed.values()) == expected.fixed_bytes
    assert (found.kv_bytes, found.kv_tokens) == (expected.kv_bytes, expected.kv_tokens)
    assert found.ungrouped_tokens == found.kv_tokens


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-4-scout-17b-16e", 108_641_793_536 - 871_932_416),  # without the image encoder, which is not loaded
        ("kimi-k2.5", 1_026_879_376_368 - 471_143_920),
        ("deepseek-v2-lite", 15_706_484_224),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_published_numbers_of_parameters(name: str, parameters: int) -> None:
    assert num_weights(make_plan(name, "8xB200")) == parameters


def test_scout_on_two_h200() -> None:
    found = make_plan("llama-4-scout-17b-16e", "2xH200")
    (plan,) = found.plans
    assert weight_gib(found) == pytest.approx(200.7, abs=0.05)
    assert weight_gib(plan) == pytest.approx(200.7 / 2, abs=0.05)
    assert plan.max_context < plan.kv_tokens < 10_485_760, "10 M tokens do not fit, so tables are for fewer"
    chunks, full = plan.groups
    assert (chunks.bytes_per_token, full.bytes_per_token) == (147_456 // 2, 49_152 // 2)
    # Three groups of chunked layers keep a chunk and the tokens of two steps, of which one may be running.
    kept = 3 * (8192 // 64 + 2 * 8192 // 64 + 2)
    assert plan.kv_tokens == (plan.kv_bytes // (full.bytes_per_token * 64) - kept) * 64
    assert plan.ungrouped_tokens == plan.total_kv_bytes // (196_608 * 64) * 64
    assert plan.kv_tokens > 3.7 * plan.ungrouped_tokens
    in_use = plan.concurrent_sequences(8192) * 8192 * 196_608
    assert plan.total_kv_bytes - 8192 * 196_608 < in_use <= plan.total_kv_bytes
    packed = make_plan("llama-4-scout-17b-16e", "2xH200", weights="packed").best
    assert packed.total_kv_bytes > 56 * GIB and packed.kv_tokens > 1_200_000


def test_scout_in_bf16_on_two_h200() -> None:
    plan = make_plan("llama-4-scout-17b-16e", "2xH200").best
    assert plan.total_kv_bytes > 56 * GIB and plan.kv_tokens > 1_200_000


def test_utilization_decides_what_the_kv_cache_gets() -> None:
    plans = [make_plan("llama-4-scout-17b-16e", "2xH200", gpu_memory_utilization=part).best for part in (0.95, 0.98)]
    less, more = (plan.total_kv_bytes for plan in plans)
    assert more - less == pytest.approx(0.03 * 2 * plans[0].gpus.memory_bytes, rel=1e-3)


def test_kimi_on_eight_h100() -> None:
    found = make_plan("kimi-k2.5", "8xH100", **SMALL_STEPS)
    assert num_weights(found, "routed experts") == pytest.approx(1014.7e9, rel=1e-4)
    other = num_weights(found) - num_weights(found, "routed experts")
    assert other == pytest.approx(11.7e9, rel=5e-3)
    assert weight_gib(found, "int4") * GIB == num_weights(found, "routed experts") * 4.5 / 8
    assert weight_gib(found) == pytest.approx(553.4, abs=0.1)  # a copy of the head would not be worth its memory
    plans = {plan.sharing: plan for plan in found.plans}
    copied, shared = plans["tensor parallel"], plans["context parallel"]
    assert copied.groups[0].bytes_per_token == 70_272 and shared.groups[0].bytes_per_token == 70_272 // 8
    assert found.best is shared
    assert copied.kv_tokens == copied.total_kv_bytes // (8 * 70_272 * 64) * 64
    assert shared.kv_tokens == shared.total_kv_bytes // (70_272 * 64) * 64
    assert "too little" in found.rejected["data-parallel attention"]
    assert shared.total_kv_bytes > 35 * GIB
    with pytest.raises(ModelError, match="does not fit"):
        make_plan("kimi-k2.5", "8xH100", gpu_memory_utilization=0.92)


def test_few_kv_heads_are_copied_unless_kv_is_shared_out() -> None:
    found = make_plan("qwen3-30b-a3b", "8xH100")  # 4 KV heads
    plans = {plan.sharing: plan for plan in found.plans}
    assert [plan.groups[0].bytes_per_token for plan in found.plans] == [98_304 // 4, 98_304 // 8, 98_304]
    assert plans["context parallel"].kv_tokens == pytest.approx(2 * plans["tensor parallel"].kv_tokens, rel=1e-3)
    alone = plans["data-parallel attention"]
    assert alone.caches == 8 and alone.kv_tokens == 8 * (alone.kv_bytes // (98_304 * 64) * 64)
    assert num_weights(alone, "attention") > 7 * num_weights(plans["context parallel"], "attention")
    assert [plan.sharing for plan in make_plan("qwen3-30b-a3b", "4xH100").plans] == ["tensor parallel"]


def test_heads_that_cannot_be_divided() -> None:
    config = load("qwen3-30b-a3b") | {"num_attention_heads": 30, "num_key_value_heads": 5}
    found = make_plan(config, "4xH100")
    assert found.best.sharing == "data-parallel attention"
    assert "30 attention heads cannot be divided evenly among 4 ranks" in found.rejected["tensor parallel"]


def test_formats_have_their_bits() -> None:
    gpt = make_plan("gpt-oss-20b", "H100")
    padded_columns = 2944 / 2880  # kernels of an H100 read 128 columns at a time
    assert weight_gib(gpt, "mxfp4") * GIB == num_weights(gpt, "routed experts") * 4.25 / 8 * padded_columns
    copied_head = 201088 * 2880 * 12.2 / 8 / GIB  # packed, beside the plain one
    assert weight_gib(gpt) - copied_head == pytest.approx(13.76e9 / GIB, rel=0.02)  # the published files, padded
    assert weight_gib(gpt, "bf16+uw12") == pytest.approx(num_weights(gpt, "head") * 28.2 / 8 / GIB, rel=5e-3)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    qwen = make_plan(load("qwen3-30b-a3b") | {"quantization_config": fp8}, "H100")
    narrow = num_weights(qwen, "routed experts", "attention")
    assert weight_gib(qwen, "fp8") * GIB == narrow * (1 + 4 / 128**2)
    assert num_weights(qwen, "embedding", "router", "head") * 2 / GIB == pytest.approx(weight_gib(qwen, "bf16"))
    online = make_plan("qwen3-30b-a3b", "H100", weights="fp8")
    assert weight_gib(online, "fp8") * GIB == pytest.approx(narrow, rel=4e-3)  # with a scale for each row
    int4 = make_plan("qwen3-30b-a3b", "H100", weights="int4")
    assert weight_gib(int4, "int4") * GIB == narrow * (4 + 16 / 128) / 8
    packed = make_plan("qwen3-30b-a3b", "H100", weights="packed")
    plain = num_weights(packed, "attention") * 2 / GIB  # small matrices beside experts
    assert weight_gib(packed, "bf16") == pytest.approx(plain, rel=0.04)  # and the routers
    whole = weight_gib(make_plan("qwen3-30b-a3b", "H100"))
    assert weight_gib(packed, "uw12") == pytest.approx((whole - plain) * 12.2 / 16, rel=5e-3)


def test_activations_of_a_step() -> None:
    (llama,) = make_plan(LLAMA_8B, "H200").plans
    # The hidden state, a normed copy, and activations of gates and ups, which the kernels do not store. Attention needs
    # less: 2 * 4096 + 6144 + 4096. Logits need more: 2 rows of each request, and one of each of 512 scored tokens.
    assert llama.fixed["activations"] == 2 * 8192 * (2 * 4096 + 14336)
    kept, of_step = 256 + 64, 2 * 256 + 512
    assert llama.fixed["logits"] == 4 * 128256 * (kept + of_step) - llama.fixed["activations"]
    kimi = make_plan("kimi-k2.5", "8xH100", **SMALL_STEPS).best
    # Besides the state, there are zeros to which experts add, and their sum. Rows have places in tiles of 64 rows of an
    # expert; inputs are copied into a part of them at a time. Attention needs less.
    state, normed = 2 * 2048 * 3 * 7168, 2048 * (2 * 7168 + 4 * 384)
    places, copied = 2048 * 8 + 384 * 63, 24_576
    routed = places * (2 * 2048 // 8 + 24) + 2 * copied * 7168
    assert kimi.fixed["activations"] == state + normed + routed + 2 * 2048 * 7168
    # All ranks' logits of requests and scored tokens, with copies of the 64 that are exchanged at a time, need less.
    assert kimi.fixed["logits"] == 4 * 163_840 * (64 + 64)
    assert kimi.fixed["activations"] > 4 * 163_840 * (64 + 512 + 2 * 64)


def test_window_tokens_of_the_running_step_are_reserved() -> None:
    few, many = (make_plan("gpt-oss-20b", "H100", max_batch_tokens=n).best for n in (1024, 8192))
    kept = [plan.table_blocks * 64 - plan.kv_tokens for plan in (few, many)]
    assert kept[1] - kept[0] == 2 * (8192 - 1024)
    assert few.kv_tokens > few.ungrouped_tokens * 1.9


def test_sequences_at_the_same_time_keep_only_their_windows() -> None:
    plan = make_plan("gpt-oss-20b", "H100").best
    assert plan.tables is not None and plan.tables.windows == (0, 128)
    count, held, prompt = plan.concurrent_sequences(32768), 512 + 3, 512 + 2 + 2 * 128 + 2
    assert prompt + (count - 1) * held <= plan.table_blocks < prompt + count * held


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("settings", [{}, {"kv_memory": 10 * GIB + 1}, {"kv_host_memory": 1}], ids=str)
def test_groups_of_layers_are_planned_as_the_engine_plans_them(name: str, settings: dict[str, Any]) -> None:
    engine_settings = EngineConfig.build("", **settings).with_gpu_defaults()
    config = ModelConfig.from_hf(GROUPED[name])
    expected = plan_engine_memory(
        config, engine_settings, GPU_MODELS["H200"].memory_bytes, "bfloat16", kernels="hopper"
    )
    assert not expected.groups.is_single
    (found,) = make_plan(GROUPED[name], "H200", **settings).plans
    assert found.fixed == {part: getattr(expected, part) for part in found.fixed}
    assert (found.kv_bytes, found.table_blocks) == (expected.kv_bytes, expected.kv_blocks)
    assert found.kv_tokens == expected.max_request_tokens
    if "kv_memory" in settings:
        block = expected.kv_bytes // expected.kv_blocks
        assert 0 <= 10 * GIB - expected.kv_bytes < len(expected.groups.windows) * block


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedModel, "quant_method 'hqq'"),
        ({"quantization_config": {}}, ModelFileError, "quant_method is missing"),
        ({"torch_dtype": "int8"}, ModelFileError, "torch_dtype is 'int8'"),
        ({"moe_intermediate_size": 770, "num_experts": 126}, UnsupportedModel, "126 experts cannot be divided"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_planned(changes: dict[str, Any], error: type[EmberlineError], message: str) -> None:
    with pytest.raises(error) as refused:
        make_plan(load("qwen3-30b-a3b") | changes, "4xH100")
    assert message in refused.value.message


def test_partly_quantised_kind_is_refused() -> None:
    config = load("kimi-k2.5")
    ignored = config["text_config"]["quantization_config"]["ignore"]
    ignored[1] = "re:.*layers.7.self_attn.*"
    with pytest.raises(UnsupportedModel, match="some matrices of the kind 'attention'"):
        make_plan(config, "8xB200")
    ignored[1] = "re:("
    with pytest.raises(ModelFileError, match=r"unsupported pattern, 're:\('"):
        make_plan(config, "8xB200")


def test_pattern_of_a_config_takes_linear_time() -> None:
    """With backtracking, the first pattern would need 2^30 steps and more for each name."""
    config = load("kimi-k2.5")
    ignored = config["text_config"]["quantization_config"]["ignore"]
    plan = make_plan(config, "8xB200")
    ignored.append(r"re:(\w+\.?)+!")
    assert make_plan(config, "8xB200") == plan
    for pattern, reason in ((r"re:(?!lm_head).*", "RE2 reports"), ("re:" + "a" * 600, "has 603 characters")):
        ignored[-1] = pattern
        with pytest.raises(ModelFileError, match=reason):
            make_plan(config, "8xB200")


@pytest.mark.parametrize("text", ["2xA10", "0xH100", "x", "H100x2", "", "2000xH100"])
def test_unknown_gpus_list_the_known_ones(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        GPUSet.parse(text)
    assert "H100 H200 B200" in (refused.value.hint or "")


def test_names_of_gpus() -> None:
    assert GPUSet.parse("h200") == GPUSet("H200", 1, 150_123_642_880)
    assert GPUSet.parse("8xh100").count == 8 and str(GPUSet.parse("8xH100")) == "8 x H100"


def test_bench_reports_plans_and_models_that_do_not_fit() -> None:
    report = BenchReport("memory-plans")
    too_few = memory_plans.PlanCase("kimi_4xh100", "kimi-k2.5.json", "4xH100")
    for case in (*memory_plans.CASES, too_few):
        memory_plans.add_case(report, case, CONFIGS)
    values = {name: result.value for name, result in report.results.items()}
    plan = make_plan("llama-4-scout-17b-16e", "2xH200").best
    assert values["scout_2xh200_kv_gib"] == plan.total_kv_bytes / GIB
    assert values["scout_2xh200_kv_tokens"] == plan.kv_tokens
    assert values["kimi_8xh100_kv_gib"] > values["kimi_8xh100_large_steps_kv_gib"] > values["kimi_4xh100_kv_gib"] == 0
    assert values["kimi_8xh100_kv_tokens"] > 7 * values["kimi_8xh100_kv_tokens_tensor_parallel"]
    assert "does not fit" in report.config["kimi_4xh100"]["error"]


def test_a_head_for_multi_token_prediction_is_one_more_layer() -> None:
    config = load("kimi-k2.5")
    with pytest.raises(UnsupportedModel, match="'kimi_k2' has no head for multi-token prediction"):
        make_plan(config, "8xH200", speculate="mtp", **SMALL_STEPS)
    config["text_config"]["num_nextn_predict_layers"] = 1
    plain = make_plan(config, "8xH200", max_draft=4, speculate="ngram", **SMALL_STEPS)
    drafts = make_plan(config, "8xH200", speculate="mtp", **SMALL_STEPS)
    assert (len(plain.groups[0].layers), len(drafts.groups[0].layers)) == (61, 62)
    assert drafts.groups[0].bytes_per_token * 61 == plain.groups[0].bytes_per_token * 62
    experts = (384 + 1) * 3 * 2048 * 7168 + 384 * 7168
    attention = 7168 * (1536 + 512 + 64 + 64 * 128) + 1536 * 64 * 192 + 512 * 64 * 256
    assert 0 <= num_weights(drafts) - num_weights(plain) - experts - attention - 2 * 7168**2 < 10 * 7168
    states = 2 * 7168 * 2 * (2048 + 64)  # of the tokens of a step, without padding
    assert drafts.best.fixed["activations"] - plain.best.fixed["activations"] >= states
    assert drafts.best.fixed["scratch"] > plain.best.fixed["scratch"] + 100e6  # partial results of its attention
    assert drafts.best.kv_tokens < plain.best.kv_tokens


def run_doctor(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["doctor", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_doctor_prints_one_json_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load("llama-4-scout-17b-16e")))
    plan = make_plan("llama-4-scout-17b-16e", "2xH200").best
    for model in (tmp_path, tmp_path / "config.json"):
        code, output = run_doctor(capsys, "--model", model, "--gpus", "2xH200", "--json")
        found = json.loads(output)
        assert code == 0 and found["kv_sharing"] == "tensor parallel" and found["is_calculation_only"]
        assert (found["kv_tokens"], found["parameters"]) == (plan.kv_tokens, 107_769_861_120)
        assert found["kv_gib"] == pytest.approx(plan.total_kv_bytes / GIB, abs=1e-3)
        assert found["weights_gib"] == pytest.approx(200.7, abs=0.05)
        assert [group["max_tokens"] for group in found["kv_groups"]] == [8256, None]
        assert sum(found["one_gpu"].values()) == pytest.approx(found["gpus"]["gib_each"], abs=0.01)
        assert found["one_gpu"]["reserve_gib"] == RESERVE_BYTES / GIB


def test_doctor_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--max-running", 64, "--max-batch-tokens", 2048)
    code, output = run_doctor(capsys, "--model", CONFIGS / "kimi-k2.5.json", "--gpus", "8xH100", *arguments)
    assert code == 0 and "has not been run on several GPUs" in output and "serve with --tp 8: " in output
    for words in ("kimi_k2 on 8 x H100", "latent", "70272", "context parallel", "tensor parallel", "int4 531.56"):
        assert words in output
    assert max(map(len, output.splitlines())) < 160
    code, output = run_doctor(capsys, "--model", CONFIGS / "gpt-oss-20b.json", "--gpus", "H100")
    assert code == 0 and "several GPUs" not in output and "window 128" in output and "without --mtp" in output
    assert "mxfp4 weights stay quantised on a GPU" in output


@pytest.mark.parametrize(
    ("model", "gpus", "settings", "reason"),
    [
        (
            "kimi-k2.5",
            "8xH100",
            "--tp 8",
            "11.5 GiB, on every GPU, which does not fit; so the latents .* are kept 8 times",
        ),
        (
            "kimi-k2.5",
            "8xH200",
            "--tp 8 --ep 8 --dp-attention",
            "6[.][0-9] times as many as with --tp 8, .* latents",
        ),
        ("qwen3-30b-a3b", "8xH100", "--tp 8 --ep 8 --dp-attention", "2.0 times as many .* copies of KV heads"),
        ("qwen3-30b-a3b", "4xH100", "--tp 4", "the GPUs divide the KV heads evenly"),
        ("llama-4-scout-17b-16e", "2xH200", "--tp 2", "the GPUs divide the KV heads evenly"),
    ],
)
def test_layout_is_chosen_with_a_reason(model: str, gpus: str, settings: str, reason: str) -> None:
    found = choose_layout(make_plan(model, gpus, **SMALL_STEPS))
    assert found is not None and found.settings == settings
    assert re.search(reason, found.reason), found.reason


def test_layout_on_one_gpu() -> None:
    assert choose_layout(make_plan("qwen3-30b-a3b", "H200")) is None


def test_data_parallel_attention_replicates_attention_only() -> None:
    """Shared experts are divided, because rows are sent to all GPUs."""
    found = make_plan("kimi-k2.5", "8xH200", **SMALL_STEPS)
    own = select_own(found)
    assert num_weights(own, "attention") == num_weights(found, "attention")
    for kind in ("routed experts", "shared experts"):
        assert num_weights(own, kind) * 8 == num_weights(found, kind)
    assert own.expert_groups == 8


def select_own(found: GPUSetPlan) -> GPUPlan:
    return next(plan for plan in found.plans if plan.sharing == "data-parallel attention")


@pytest.mark.parametrize(("model", "gpus"), [("qwen3-30b-a3b", "8xH100"), ("deepseek-v2-lite", "2xH200")])
def test_ranks_with_requests_of_their_own_are_planned_as_the_engine_plans_them(model: str, gpus: str) -> None:
    """Both count the attention of all heads, the KV cache of one rank, and the rows of other ranks."""
    count, settings = int(gpus[0]), {**SMALL_STEPS, "max_context": 8192}
    own = EngineConfig.build("", tp=count, ep=count, dp_attention=True, **settings).with_gpu_defaults()
    config = Layout.of_gpus(own.parallel).shard(0).shard_config(ModelConfig.from_hf(load(model)))
    found = make_plan(model, gpus, **settings)
    expected, without = (
        plan_engine_memory(config, each, GPU_MODELS[gpus[2:]].memory_bytes, "bfloat16", kernels="hopper")
        for each in (own, own.with_settings(dp_attention=False))
    )
    planned = select_own(found)
    assert planned.fixed == {name: getattr(expected, name) for name in planned.fixed}
    assert planned.kv_tokens == expected.kv_tokens * count
    copies = (count + 2) * 2048 * 2 * config.hidden  # to and from each rank, and the inputs and sums of all rows
    assert copies < expected.activations - without.activations < 2 * copies


def test_doctor_reports_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, output = run_doctor(capsys, "--model", CONFIGS / "kimi-k2.5.json", "--gpus", "8xTPU")
    assert code == 1 and "8xTPU" in output and "known GPUs:" in output
    code, output = run_doctor(capsys, "--model", CONFIGS / "kimi-k2.5.json", "--gpus", "H100", "--json")
    assert code == 1 and "does not fit" in json.loads(output)["error"]
    code, output = run_doctor(capsys, "--model", CONFIGS / "gpt-oss-20b.json", "--gpus", "H100", "--mtp")
    assert code == 1 and "'gpt_oss' has no head" in output
    code, output = run_doctor(capsys, "--mtp")
    assert code == 1 and "--mtp needs --gpus" in output
    code, output = run_doctor(capsys, "--model", tmp_path / "none.json", "--gpus", "H100")
    assert code == 1 and "none.json" in output
    code, output = run_doctor(capsys, "--model", CONFIGS / "gpt-oss-20b.json", "--gpus", "H100", "--max-context", 10**6)
    assert code == 1 and "max_context must be from 1 to 131072" in output
    code, output = run_doctor(capsys, "--model", CONFIGS / "gpt-oss-20b.json", "--gpus", "H100", "--block-size", 48)
    assert code == 1 and "block_size is 48" in output
    with pytest.raises(SystemExit):
        run_doctor(capsys, "--gpus", "H100", "--gpu-memory", "80G")
