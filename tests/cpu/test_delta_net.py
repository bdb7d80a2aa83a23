"""Qwen3-Next and Qwen3.5 models compared with transformers in float32, on both backends."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny
import tiny_delta
import torch
from paged_model import Cache, assert_close, prompts
from torch import Tensor

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import ModelError, UnsupportedModel
from emberline.engine import memory
from emberline.engine.gpu_plan import plan_gpus
from emberline.engine.gpu_set import GPUSet
from emberline.engine.kv_shape import make_state_shape
from emberline.engine.memory import plan_engine_memory
from emberline.engine.memory_plan import MemoryPlan
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kv.cache import StateCache
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of, read_outline
from emberline.models.kv_groups import read_kv_groups
from emberline.models.loader import load_decoder


@pytest.fixture(autouse=True)
def restored_backend() -> Iterator[None]:
    before = ops.current_backend()
    yield
    ops.start_backend(native=before.library is not None)


@pytest.mark.parametrize("name", tiny_delta.CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = tiny_delta.write(tmp_path, name)
    tokens = prompts(37, 21, 2, 70)
    theirs = tiny_delta.compute_logits(oracle, tokens)
    for native in (True, False) if ops.current_backend().library is not None else (False,):
        ops.start_backend(native=native)
        model = load_decoder(tmp_path)
        assert model.weight_bytes == memory.weight_bytes(model.config, 4)
        mixed = Cache(model, tokens, 1).run(1)
        assert_close(mixed, theirs)
        if native:
            whole = [Cache(model, [ids]).step([len(ids)]) for ids in tokens]
            assert all(torch.equal(a, b) for a, b in zip(mixed, whole, strict=True)), "depends on chunks or batch"


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_text_part_of_a_published_checkpoint(name: str, tmp_path: Path) -> None:
    """The tensors of the image encoder and of multi-token prediction are not loaded."""
    oracle = tiny_delta.write_with_images(tmp_path, name)
    tokens = prompts(20)
    model = load_decoder(tmp_path)
    assert_close(Cache(model, tokens).run(0), tiny_delta.compute_logits(oracle, tokens))
    assert model.config.eos == (2,) and model.config.tie_embeddings == (name == "dense")
    assert model.weight_bytes == memory.weight_bytes(model.config, 4)
    outline = read_outline(Checkpoint.open(tmp_path).config)
    assert outline == outline_of(model.config)


def test_sizes_of_states() -> None:
    """The memory plan of a GPU, the states of the CPU and doctor count the same bytes."""
    config = tiny_delta.make_config("next") | {"linear_conv_kernel_dim": 5}
    shape = make_state_shape(ModelConfig.from_hf(config))
    (group,) = (group for group in read_kv_groups(config, "float32") if group.kind == "state")
    assert shape is not None and shape.slot_bytes == group.bytes_per_sequence == 3 * 4 * (4 * (48 + 40) + 4 * 12 * 10)
    cache = StateCache(shape, 5)
    assert cache.num_bytes == cache.conv.nbytes + cache.matrices.nbytes
    cache.conv[:, 3], cache.matrices[:, 3] = 1.5, 2.5
    cache.copy_slot(3, 0)
    assert cache.conv[:, 0].eq(1.5).all() and cache.matrices[:, 0].eq(2.5).all() and not cache.conv[:, 1].any()


def test_plan_of_quantised_weights() -> None:
    """The quantization_config of the outer config applies to the language model."""
    text = {name: value for name, value in tiny_delta.make_config("moe").items() if name != "architectures"}
    outer = {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": True}
    quantised = {"quant_method": "fp8", "modules_to_not_convert": ["linear_attn", "self_attn", "shared_expert"]}
    plan = plan_gpus(
        outer | {"quantization_config": quantised}, GPUSet.parse("1xH200"), EngineConfig.build("").with_gpu_defaults()
    )
    formats = {share.kind: share.format for share in plan.weights}
    assert formats["routed experts"] == "fp8" and formats["attention"] == "bf16" and "head" not in formats
    assert [group.kind for group in plan.groups] == ["state", "full"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has no 'full_attention'"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types is .* a list of 4 layer types"),
        ({"layer_types": ["sliding_attention", *["full_attention"] * 3]}, "layer_types has 'sliding_attention'"),
        ({"layer_types": None, "full_attention_interval": 5}, "full_attention_interval is '5'"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is '0'"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is '3'; it must be a multiple of linear_num_key_heads"),
        ({"linear_key_head_dim": -1}, "linear_key_head_dim is '-1'"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is '0'"),
        ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim is '4'; it must be a whole number"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ({"linear_gate_rank": 8}, "linear_gate_rank"),
        ({"norm_topk_prob": False}, "sets norm_topk_prob to 'False' for qwen3_5_moe_text: only True is supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor is '0.1'"),
    ],
)
def test_bad_configs(changes: dict[str, Any], words: str) -> None:
    name = "moe" if "norm_topk_prob" in changes else "next"
    config = {name: value for name, value in (tiny_delta.make_config(name) | changes).items() if value is not None}
    with pytest.raises(ModelError, match=words):
        ModelConfig.from_hf(config)


def test_states_in_the_plan_of_a_gpu() -> None:
    config, limits = ModelConfig.from_hf(tiny_delta.make_config("next")), {"max_running": 8, "block_size": 16}
    slot, block = 8928, 2 * 16 * 2 * 16 * 2  # one layer has keys and values

    def plan(total: int = 8 << 30, **settings: Any) -> MemoryPlan:
        settings = limits | settings
        return plan_engine_memory(config, EngineConfig.build("", **settings).with_gpu_defaults(), total, "bfloat16")

    planned = plan()
    assert planned.state_slots == 24 and planned.states == 25 * slot
    assert planned.spare_bytes >= 0 and ("states", planned.states) in planned.named_sizes()
    assert planned.kv_bytes + planned.states <= 0.98 * planned.total - (planned.fixed_bytes - planned.states)
    small = plan(kv_memory=20 * slot)  # half of it is for states, of which one is for padding
    assert small.state_slots == 9 and small.kv_bytes == 10 * slot // block * block
    assert plan(kv_tokens=4096).kv_tokens == 4096
    # With a number of tokens, their keys and values come first: more than half of the memory, if they need it.
    most = ((wide := plan(max_running=512)).kv_bytes + wide.states - 16 * slot) // (block // 16)
    crowded = plan(kv_tokens=most, max_running=512)
    assert crowded.kv_tokens >= most and 10 < crowded.state_slots < 20
    with pytest.raises(ModelError, match=r"states of 8928 bytes each get what \d+ bytes of keys and values leave"):
        plan(kv_tokens=most + 15 * slot // (block // 16), max_running=512)
    with pytest.raises(ModelError, match=r"35712 bytes, and recurrent states of 8928 bytes each get half of it; 1 fit"):
        plan(kv_memory=4 * slot)
    full = ModelConfig.from_hf(tiny_delta.make_config("next") | {"layer_types": ["full_attention"] * 4})
    assert not plan_engine_memory(full, EngineConfig.build("").with_gpu_defaults(), 8 << 30, "bfloat16").states


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"exact": True}, "which --exact on a GPU does not support"),
    ],
)
def test_settings_of_a_gpu_that_are_refused(settings: dict[str, Any], words: str) -> None:
    config = ModelConfig.from_hf(tiny_delta.make_config("dense"))
    with pytest.raises(UnsupportedModel, match=words):
        plan_engine_memory(config, EngineConfig.build("", **settings).with_gpu_defaults(), 1 << 40, "bfloat16")


@pytest.mark.parametrize("kernel", [4, 1])
@pytest.mark.parametrize("native", [True, False])
def test_states_advance_over_accepted_drafts_only(native: bool, kernel: int) -> None:
    """The same outputs and states as without drafts, and saved states after any row; native kernels: the same bits."""
    if (current := ops.current_backend()).library is None and native:
        pytest.skip("no native kernels")
    backend = current if native else ops.ReferenceBackend()
    random, chooser = torch.Generator().manual_seed(5), Random(kernel)
    sizes = {"key_heads": 2, "value_heads": 4, "key_dim": 9, "value_dim": 70}
    layer = ops.DeltaLayer(
        **sizes,
        conv_weight=torch.randn(kernel, 316, generator=random),
        rates=torch.rand(4, generator=random),
        time_bias=torch.randn(4, generator=random),
    )
    length, count = 40, 2
    inputs = torch.randn(count, length, layer.channels + 8, generator=random)

    def compute(counts: list[int], starts: list[int], rows: Tensor, states: ops.LayerStates) -> Tensor:
        edges, context = (torch.tensor(each, dtype=torch.int32) for each in ([0, *accumulate(counts)], starts))
        states = states._replace(metadata=ops.AttentionMetadata(empty, empty, edges, context, empty))
        x, steps, times = rows.split([layer.channels, 4, 4], dim=1)
        return backend.compute_delta_rule(
            backend.convolve(x, layer, states), ops.DeltaGates(steps, times), layer, states
        )

    empty, slots = torch.empty(0), torch.tensor([3, 1], dtype=torch.int32)
    metadata = ops.AttentionMetadata(empty, empty, empty, empty, empty)
    states = ops.LayerStates(
        torch.full((5, kernel - 1, 316), torch.nan), torch.full((5, 4, 9, 70), torch.nan), slots, metadata
    )
    expected, after = [], []  # by sequence: its outputs, and its states after each row
    for b in range(count):
        alone, outputs, kept = states._replace(slots=slots[:1]), [], []
        for position in range(length):
            outputs.append(compute([1], [position], inputs[b, position : position + 1], alone))
            kept.append((alone.conv[3].clone(), alone.matrices[3].clone()))
        expected.append(torch.cat(outputs))
        after.append(kept)
    done, accepted = [0, 0], [0, 0]
    drafted_rows = torch.full((3, 3, 316), torch.nan), torch.full((3, 3, layer.draft_width), torch.nan)
    while min(done) < length - 8:
        known = [chooser.randint(1, 2) if done[b] else 2 for b in range(count)]
        drafts = [chooser.randint(0, 3) if done[b] else 0 for b in range(count)]
        right = [chooser.randint(0, each) for each in drafts]
        rows = []
        for b in range(count):
            wrong = torch.randn(drafts[b] - right[b], layer.channels + 8, generator=random)
            rows.append(torch.cat([inputs[b, done[b] : done[b] + known[b] + right[b]], wrong]))
        saved = [chooser.randint(0, accepted[b] + known[b]) for b in range(count)]
        places, *numbers = (torch.tensor(each, dtype=torch.int32) for each in ([2, 0], accepted, drafts, [0, 4], saved))
        step = states._replace(
            drafts=ops.StateDrafts(*drafted_rows, places, *numbers[:2]), saves=ops.StateSaves(*numbers[2:])
        )
        outputs = compute([len(each) for each in rows], done, torch.cat(rows), step).split([len(each) for each in rows])
        for b in range(count):
            begin, end = done[b], done[b] + known[b]
            pairs = [(outputs[b][: known[b] + right[b]], expected[b][begin : end + right[b]])]
            for slot, last in ((int(slots[b]), end), ((0, 4)[b], begin - accepted[b] + saved[b])):
                if slot in (3, 1) or saved[b]:
                    pairs += zip((states.conv[slot], states.matrices[slot]), after[b][last - 1], strict=True)
            for found, wanted in pairs:
                torch.testing.assert_close(found, wanted, rtol=0 if native else 1e-4, atol=0 if native else 1e-5)
            done[b], accepted[b] = end + right[b], right[b]


def test_fields_of_recurrent_layers_are_unknown_elsewhere() -> None:
    for model_type, name in (("olmo2", "Olmo2"), ("llama", "Llama")):  # one of these accepts fields of no family
        config = tiny.config("llama", linear_num_key_heads=2)
        config |= {"model_type": model_type, "architectures": [f"{name}ForCausalLM"]}
        with pytest.raises(UnsupportedModel, match="sets linear_num_key_heads to '2' for"):
            ModelConfig.from_hf(config)


def test_the_rule_in_torch() -> None:
    """Each op of the native kernels equals its meaning in torch, with a state before and without."""
    if (native := ops.current_backend()).library is None:
        pytest.skip("no native kernels")
    random, reference = torch.Generator().manual_seed(5), ops.ReferenceBackend()
    sizes = {"key_heads": 2, "value_heads": 6, "key_dim": 33, "value_dim": 150}
    numbers = [torch.randn(shape, generator=random) for shape in ((4, 1032), (6,), (6,))]
    layer = ops.DeltaLayer(**sizes, conv_weight=numbers[0], rates=numbers[1].abs(), time_bias=numbers[2])
    starts, context = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 6, 8], [3, 0, 7]))
    empty, slots = torch.empty(0), torch.tensor([4, 0, 2], dtype=torch.int32)
    metadata = ops.AttentionMetadata(empty, empty, starts, context, empty)
    wide = torch.randn(8, layer.channels + layer.values + 12, generator=random)
    x, gate, steps, times = wide.split([layer.channels, layer.values, 6, 6], dim=1)
    times[0, 0] = 30.0  # so large that softplus is the identity
    norm, results = torch.randn(150, generator=random), []
    conv, matrices = torch.randn(5, 3, 1032, generator=random), torch.randn(5, 6, 33, 150, generator=random)
    for backend in (native, reference):
        states = ops.LayerStates(conv.clone(), matrices.clone(), slots, metadata)
        mixed = backend.convolve(x, layer, states)
        out = backend.compute_delta_rule(mixed.clone(), ops.DeltaGates(steps, times), layer, states)
        gated = backend.norm_and_gate(out.clone(), gate, norm, 1e-3)
        results.append([mixed, out, gated, backend.apply_sigmoid_gate(out.clone(), gate.contiguous()), *states[:2]])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    for kept, before in ((results[0][4], conv), (results[0][5], matrices)):
        assert torch.equal(kept[[1, 3]], before[[1, 3]]), "a slot that is not in the batch"


def test_decays_have_the_same_bits_on_every_machine() -> None:
    """A stream may move between x86 and Arm (`core/numerics.py`), so decays must not come from each machine's libm."""
    if (native := ops.current_backend()).library is None:
        pytest.skip("no native kernels")
    times, rates = torch.arange(-512, 512) / 16, torch.arange(1, 1025) / 256
    layer = ops.DeltaLayer(1, 1024, 1, 1, torch.zeros(4, 1026), rates, torch.zeros(1024))
    starts, context = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    metadata = ops.AttentionMetadata(torch.empty(0), torch.empty(0), starts, context, torch.empty(0))
    states = ops.LayerStates(torch.empty(0), torch.ones(1, 1024, 1, 1), torch.zeros(1, dtype=torch.int32), metadata)
    gates = ops.DeltaGates(torch.zeros(1, 1024), times[None])
    native.compute_delta_rule(torch.zeros(1, 1026), gates, layer, states)  # keys are 0: the states are the decays
    decays = states.matrices.flatten()
    exact = torch.exp(-rates.double() * torch.nn.functional.softplus(times.double(), threshold=100.0))
    torch.testing.assert_close(decays, exact.clamp_min(torch.e**-87).float(), rtol=2e-5, atol=0.0)
    assert zlib.crc32(decays.numpy().tobytes()) == 2855455886
