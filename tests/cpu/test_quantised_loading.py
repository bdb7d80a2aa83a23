"""Quantised checkpoints of all publishers: the values on a CPU, and the matrices that a device keeps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import publisher_packers
import pytest
import tiny
import torch
from paged_model import Cache, prompts
from publisher_packers import FORMATS, PublishedFormat
from safetensors.torch import load_file
from test_rank_formats import write_published
from torch import Tensor

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.engine.gpu.zero_weights import make_zero_weight_model
from emberline.engine.quantised_estimate import estimate_rank_quantised_sizes
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.comm.lone_rank import LoneRank
from emberline.kernels.packed_weight import PackedExperts, PackedWeight, WeightLayout
from emberline.kernels.quantised_matrix import QuantisedMatrix, dequantise, dequantise_to_bf16
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of
from emberline.models.device_weights import DeviceWeights
from emberline.models.experts_spec import per_expert_names
from emberline.models.expertsconfig import ExpertsConfig
from emberline.models.loader import load_decoder
from emberline.models.quantisation_config import read_quantisation
from emberline.models.quantised_tensors import list_quantised_sizes
from emberline.models.shard import Shard
from emberline.models.sleep import iter_instances
from emberline.models.stacked_experts import load_stacked_experts
from emberline.models.stage import Stage
from emberline.models.tensor_names import load_model
from emberline.models.weight_formats import list_online_sizes
from emberline.models.weights import Weights

ROWS, COLUMNS = 48, 64


def random_matrix(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def write(directory: Path, found: PublishedFormat, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write a checkpoint with quantised modules, and return their values in bf16."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for module, matrix in matrices.items():
        packed, exact = found.pack(matrix)
        assert ((exact - matrix).abs() <= found.error * matrix.abs().max()).all()
        tensors |= {f"{module}.{name}": tensor for name, tensor in packed.items()}
        values[module] = exact.to(torch.bfloat16)
    tiny.write_tensors(directory, tiny.config("qwen3", quantization_config=found.config), tensors)
    return values


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> list[QuantisedMatrix]:
    """Make the CPU's backend keep codes, as that of a GPU does. The list gets what is packed."""
    backend, kept = ops.current_backend(), list[QuantisedMatrix]()

    def pack(matrix: QuantisedMatrix, *, gated: bool = False) -> PackedWeight:
        kept.append(matrix)
        data = torch.empty(0, dtype=torch.bfloat16)
        return PackedWeight(data, matrix.n, matrix.k, data.dtype, WeightLayout.QUANTISED, gated, handle=matrix)

    def pack_experts(matrices: QuantisedMatrix) -> PackedExperts:
        kept.append(matrices)
        sizes = (len(matrices.codes), matrices.n, matrices.k)
        return PackedExperts(*sizes, WeightLayout.QUANTISED, matrices, matrices.nbytes)

    monkeypatch.setattr(type(backend), "keeps_quantised", lambda *_: True)
    monkeypatch.setattr(type(backend), "pack_quantised", lambda _, matrix, **options: pack(matrix, **options))
    monkeypatch.setattr(type(backend), "pack_quantised_experts", lambda _, matrices, gated: pack_experts(matrices))
    return kept


@pytest.mark.parametrize("name", FORMATS)
def test_values_on_a_cpu(name: str, tmp_path: Path) -> None:
    values = write(tmp_path, FORMATS[name], {"x": random_matrix(1)})
    weights = Weights(Checkpoint.open(tmp_path))
    assert torch.equal(weights.load_matrix("x.weight", ROWS, COLUMNS), values["x"])
    assert weights.unused_names("") == []


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_kept_on_a_device(name: str, tmp_path: Path, keeping: list[QuantisedMatrix]) -> None:
    """Parts are stacked; those of fp8 may have different scales, and blocks end at the edges of parts."""
    values = write(tmp_path, FORMATS[name], {"q": random_matrix(1), "k": 3 * random_matrix(2), "v": random_matrix(3)})
    checkpoint = Checkpoint.open(tmp_path)
    weights = DeviceWeights(checkpoint, device="cpu")
    weight = weights.linear([("q.weight", ROWS), ("k.weight", ROWS), ("v.weight", ROWS)], COLUMNS)
    assert weight.layout is WeightLayout.QUANTISED and weights.allocates_in_finish and not keeping
    planned = weights.quantised_sizes[0]
    weights.finish("")
    (matrix,) = keeping
    assert weight.handle is matrix and matrix.kind == FORMATS[name].kind
    assert torch.equal(dequantise_to_bf16(matrix), torch.cat([values["q"], values["k"], values["v"]]))
    assert (planned.rows, planned.columns) == (3 * ROWS, COLUMNS)
    assert planned.num_bytes == matrix.nbytes == weights.loaded_bytes
    order = 0 if matrix.columns is None else matrix.columns.nbytes
    estimate = sum(size.num_bytes for size in list_quantised_sizes(checkpoint))
    assert abs(estimate - (matrix.nbytes - order)) <= 3 * ROWS * 4  # one scale of a tensor is kept for each row


@pytest.mark.parametrize("spare", [0, 2])  # places for experts that are copied there later
@pytest.mark.parametrize("name", ["int4 zeros", "awq", "fp8 block", "fp8 tensor", "nvfp4", "mxfp4"])
def test_experts_kept_on_a_device(name: str, spare: int, tmp_path: Path, keeping: list[QuantisedMatrix]) -> None:
    count, ffn, hidden = 3, 32, 64
    modules = {f"l.mlp.experts.{i}.{kind}_proj": i for i in range(count) for kind in ("gate", "up", "down")}
    matrices = {
        module: random_matrix(seed, hidden, ffn) if "down" in module else random_matrix(seed, ffn, hidden)
        for seed, module in enumerate(modules)
    }
    values = write(tmp_path, FORMATS[name], matrices)
    weights = DeviceWeights(Checkpoint.open(tmp_path), device="cpu")
    experts = load_stacked_experts(
        weights, ExpertsConfig(count, 2, ffn, True, frozenset({0}), spare=spare), per_expert_names(), "l", hidden
    )
    weights.finish("")
    for found, kinds in ((experts.gate_up, ("gate", "up")), (experts.down, ("down",))):
        assert isinstance(found, PackedExperts) and isinstance(found.handle, QuantisedMatrix)
        expected = [torch.cat([values[f"l.mlp.experts.{i}.{kind}_proj"] for kind in kinds]) for i in range(count)]
        assert found.count == len(found.handle.codes) == count + spare
        assert torch.equal(dequantise(found.handle)[:count].to(torch.bfloat16), torch.stack(expected))
        assert not found.handle.codes[count:].any() and not found.handle.scales[count:].view(torch.uint8).any()
    assert sum(size.num_bytes for size in weights.quantised_sizes) == weights.loaded_bytes


def test_experts_of_two_formats_are_dequantised(tmp_path: Path, keeping: list[QuantisedMatrix]) -> None:
    """Kernels compute both matrices of an expert in one format."""
    found = FORMATS["int4 zeros"]
    tensors: dict[str, Tensor] = {}
    for i in range(2):
        for name, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
            module, matrix = f"l.mlp.experts.{i}.{name}_proj", random_matrix(i, *shape)
            packed = {"weight": matrix.to(torch.bfloat16)} if name == "down" else found.pack(matrix)[0]
            tensors |= {f"{module}.{part}": tensor for part, tensor in packed.items()}
    tiny.write_tensors(tmp_path, tiny.config("qwen3", quantization_config=found.config), tensors)
    weights = DeviceWeights(Checkpoint.open(tmp_path), device="cpu")
    experts = load_stacked_experts(weights, ExpertsConfig(2, 1, 32, True, frozenset({0})), per_expert_names(), "l", 64)
    weights.finish("")
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor) and not keeping


def test_queries_with_gates_are_not_counted_as_quantised(tmp_path: Path) -> None:
    """Their rows are reordered when they are loaded, which makes them bf16."""
    modules = [f"l.self_attn.{name}_proj" for name in "qkvo"]
    write(tmp_path, FORMATS["int4 zeros"], {module: random_matrix(1) for module in modules})
    checkpoint = Checkpoint.open(tmp_path)
    assert [len(list_quantised_sizes(checkpoint, has_query_gate=has_gate)) for has_gate in (False, True)] == [4, 1]


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_gptq_added_are_ignored_if_they_are_zero(value: float, tmp_path: Path) -> None:
    found = FORMATS["gptq"]
    tensors = {f"x.{part}": tensor for part, tensor in found.pack(random_matrix(1))[0].items()}
    tensors["x.bias"] = torch.full((ROWS,), value, dtype=torch.float16)
    tiny.write_tensors(tmp_path, tiny.config("qwen3", quantization_config=found.config), tensors)
    weights = Weights(Checkpoint.open(tmp_path))
    weights.load_matrix("x.weight", ROWS, COLUMNS)
    assert weights.unused_names("") == ([] if value == 0.0 else ["x.bias"])


def test_a_scheme_that_names_modules_precedes_one_of_all() -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "sparsity_config": {"format": "dense"}}
    section["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": weights},
        "group_1": {"targets": ["re:.*down_proj"], "weights": weights | {"symmetric": False}},
    }
    found = read_quantisation({"quantization_config": section})
    assert found is not None
    down, up = found.find_format("l.mlp.down_proj"), found.find_format("l.mlp.up_proj")
    assert down is not None and up is not None and down.zero_bits > 0 == up.zero_bits


def test_experts_of_gpt_oss_kept_on_a_device(tmp_path: Path, keeping: list[QuantisedMatrix]) -> None:
    """Rows of gate and up alternate in the files; the kept matrix has those of gate first."""
    from emberline.models.experts_spec import GPT_OSS

    count, ffn, hidden = 2, 32, 64
    random = torch.Generator().manual_seed(5)
    tensors = {}
    for name, rows, columns in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
        blocks = torch.randint(256, (count, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
        tensors[f"l.mlp.experts.{name}_blocks"] = blocks
        tensors[f"l.mlp.experts.{name}_scales"] = torch.randint(
            120, 126, blocks.shape[:3], generator=random, dtype=torch.uint8
        )
        tensors[f"l.mlp.experts.{name}_bias"] = torch.zeros(count, rows)
    tiny.write_tensors(tmp_path, tiny.config("qwen3", quantization_config={"quant_method": "mxfp4"}), tensors)
    checkpoint, config = Checkpoint.open(tmp_path), ExpertsConfig(count, 2, ffn, True, frozenset({0}))
    plain = Weights(checkpoint)
    expected = load_stacked_experts(plain, config, GPT_OSS.tensors[0], "l", hidden)
    weights = DeviceWeights(checkpoint, device="cpu")
    experts = load_stacked_experts(weights, config, GPT_OSS.tensors[0], "l", hidden)
    weights.finish("")
    for found, wanted in ((experts.gate_up, expected.gate_up), (experts.down, expected.down)):
        assert isinstance(found, PackedExperts) and isinstance(found.handle, QuantisedMatrix)
        assert torch.equal(dequantise_to_bf16(found.handle), wanted)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_stand_ins_for_quantised_weights(is_sparse: bool, tmp_path: Path, keeping: list[QuantisedMatrix]) -> None:
    """While weights are loaded, kernels run with zeros in the same form; weights that have memory stay."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = tiny.config("qwen3_moe", **sizes, **experts) if is_sparse else tiny.config("qwen3", **sizes)
    checkpoint = Checkpoint.open(tiny.write(tmp_path, config, dtype=torch.bfloat16))
    weights = DeviceWeights(checkpoint, device="cpu", online="fp8")
    model = load_model(ModelConfig.from_checkpoint(checkpoint), weights, 64)
    other = make_zero_weight_model(model)
    first, last = other.layers[0], other.layers[-1]
    made = first.attention.qkv.weight
    assert isinstance(made.handle, QuantisedMatrix) and not made.handle.codes.any() and not made.handle.scales.any()
    assert made is last.attention.qkv.weight and other.head is not None and other.head.weight is model.head.weight
    stacked = list(iter_instances(PackedExperts, other.layers))
    assert len(stacked) == (6 if is_sparse else 0) and len({id(each) for each in stacked}) == (2 if is_sparse else 0)
    assert all(isinstance(e.handle, QuantisedMatrix) and e.handle.codes.device.type == "cpu" for e in stacked)
    weights.finish("")
    matrix = model.layers[0].attention.qkv.weight.handle
    assert isinstance(matrix, QuantisedMatrix) and matrix.codes.any() and matrix.codes.device.type == "cpu"
    assert Counter(weights.quantised_sizes) == Counter(list_online_sizes(outline_of(model.config), "fp8"))


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_matrices_quantised_at_load(name: str, tmp_path: Path, keeping: list[QuantisedMatrix]) -> None:
    """Only matrices of layers are; a head stays as it is, also if its values are packed."""
    tensors = {f"{part}.weight": random_matrix(i, 256, 256).bfloat16() for i, part in enumerate(("gate", "up", "head"))}
    tiny.write_tensors(tmp_path, tiny.config("qwen3"), tensors)
    weights = DeviceWeights(Checkpoint.open(tmp_path), device="cpu", online=name)
    weight = weights.linear([("gate.weight", 256), ("up.weight", 256)], 256, gated=True)
    head = weights.linear([("head.weight", 256)], 256, full_precision=True)
    weights.finish("")
    (matrix,) = keeping
    assert weight.gated and (matrix.kind, matrix.group_columns) == (name, 256 if name == "fp8" else 128)
    values, exact = dequantise(matrix), torch.cat([tensors["gate.weight"], tensors["up.weight"]]).float()
    assert (values - exact).square().mean().sqrt() <= exact.square().mean().sqrt() * (0.03 if name == "fp8" else 0.11)
    assert head.layout is not WeightLayout.QUANTISED
    assert weights.quantised_sizes[0].num_bytes == matrix.nbytes


def test_parts_of_several_formats_are_dequantised(
    tmp_path: Path, keeping: list[QuantisedMatrix], caplog: pytest.LogCaptureFixture
) -> None:
    """Two schemes with targets: q is int4, k is fp8, v is not quantised. All become bf16 with one line in the log."""
    int4, fp8 = (FORMATS[name].config["config_groups"]["a"]["weights"] for name in ("int4", "float channel"))
    config = publisher_packers.compressed("mixed-precision")
    config["config_groups"] = {"a": {"targets": ["re:.*q$"], "weights": int4}, "b": {"targets": ["k"], "weights": fp8}}
    tensors, expected = {}, []
    for module, name in (("q", "int4"), ("k", "float channel")):
        packed, values = FORMATS[name].pack(random_matrix(3))
        tensors |= {f"{module}.{part}": tensor for part, tensor in packed.items()}
        expected.append(values.to(torch.bfloat16))
    tensors["v.weight"] = random_matrix(4).bfloat16()
    tiny.write_tensors(tmp_path, tiny.config("qwen3", quantization_config=config), tensors)
    weights = DeviceWeights(Checkpoint.open(tmp_path), device="cpu")
    parts = [("q.weight", ROWS), ("k.weight", ROWS), ("v.weight", ROWS)]
    whole = weights.stack(parts, COLUMNS)
    with caplog.at_level("INFO"):
        weights.finish("")
    assert torch.equal(whole, torch.cat([*expected, tensors["v.weight"]]))
    weights = DeviceWeights(Checkpoint.open(tmp_path), device="cpu")
    weights.linear(parts, COLUMNS)
    with caplog.at_level("INFO"):
        weights.finish("")
    assert caplog.text.count("Weights dequantised: tensors=3") == 1 and not keeping and not weights.quantised_sizes


def test_columns_in_different_orders_are_dequantised(
    tmp_path: Path, keeping: list[QuantisedMatrix], caplog: pytest.LogCaptureFixture
) -> None:
    values, found = {}, FORMATS["gptq order"]
    tensors = {}
    for module, shift in (("q", 0), ("k", 7)):
        packed, exact = found.pack(random_matrix(3))
        rolled = {**packed, "g_idx": packed["g_idx"].roll(shift)}
        if shift:  # columns of the values move with their groups
            codes = publisher_packers.quantise_integers(random_matrix(3), 32, zero_points=True, order=None)[0]
            rolled["qweight"] = publisher_packers.to_words(codes.t(), 0)
        tensors |= {f"{module}.{name}": tensor for name, tensor in rolled.items()}
        values[module] = exact
    tiny.write_tensors(tmp_path, tiny.config("qwen3", quantization_config=found.config), tensors)
    checkpoint, parts = Checkpoint.open(tmp_path), [("q.weight", ROWS), ("k.weight", ROWS)]
    expected = Weights(checkpoint).stack(parts, COLUMNS)
    weights = DeviceWeights(checkpoint, device="cpu")
    weight = weights.linear(parts, COLUMNS)
    with caplog.at_level("INFO"):
        weights.finish("")
    assert not keeping and "columns in different orders" in caplog.text
    assert weight.layout is not WeightLayout.QUANTISED
    identity = torch.eye(COLUMNS)
    product = ops.linear(identity, ops.LinearLayer(weight), float32_output=True)
    assert torch.equal(product.t(), expected.float())


@pytest.mark.parametrize("name", ["", "float channel", "mxfp4", "nvfp4", "int4"])
def test_scales_of_a_float8_cache_move_into_weights(name: str, tmp_path: Path, keeping: list[QuantisedMatrix]) -> None:
    """Scales are rounded up to powers of two: keys are divided by 1/4, and values by 2."""
    at, projections = "model.layers.0.self_attn", ("q", "k", "v", "o")
    tensors, values, config = {}, {}, {"quant_method": "fp8"} if not name else FORMATS[name].config
    for seed, projection in enumerate(projections):
        exact = random_matrix(seed, 64, 64).bfloat16()
        packed = {"weight": exact}
        if name:
            packed, floats = FORMATS[name].pack(exact.float())
            exact = floats.bfloat16()
        tensors |= {f"{at}.{projection}_proj.{part}": tensor for part, tensor in packed.items()}
        values[projection] = exact
    tensors |= {f"{at}.k_proj.k_scale": torch.tensor(0.2), f"{at}.v_proj.v_scale": torch.tensor([1.5])}
    tensors[f"{at}.k_proj.bias"] = torch.ones(64)
    tiny.write_tensors(tmp_path, tiny.config("qwen2", quantization_config=config), tensors)
    weights = DeviceWeights(Checkpoint.open(tmp_path), device="cpu", kv_scales=True)
    parts = [(f"{at}.{projection}_proj.weight", 64) for projection in projections]
    linear = weights.linear(parts, 64) if name else None
    whole = None if name else weights.stack(parts, 64)
    bias = weights.load_vector(f"{at}.k_proj.bias", 64)
    weights.finish("")
    assert (linear is None or linear.handle is keeping[0]) and torch.equal(bias, torch.full((64,), 4.0))
    found = dequantise(keeping[0]).bfloat16() if whole is None else whole
    expected = [values[projection] * factor for projection, factor in zip(projections, (0.25, 4, 0.5, 2), strict=True)]
    assert torch.equal(found, torch.cat(expected))
    assert DeviceWeights(Checkpoint.open(tmp_path), device="cpu").unused_names(".*_proj.*") == []


def test_scales_of_norms_and_bad_scales_of_a_float8_cache(tmp_path: Path) -> None:
    at = "model.layers.3.self_attn"
    tensors = {f"{at}.{name}_proj.weight": random_matrix(1, 64, 64).bfloat16() for name in ("q", "k")}
    tensors |= {f"{at}.{name}_norm.weight": torch.ones(8) for name in ("q", "k")}
    for scale, message in (
        (torch.tensor(3.0), ""),
        (torch.tensor(torch.nan), "k_scale"),
        (torch.ones(8), "k_scale"),
    ):
        config = tiny.config("qwen3", quantization_config={"quant_method": "fp8"})
        tiny.write_tensors(tmp_path, config, {**tensors, f"{at}.attn.k_scale": scale})
        if message:
            with pytest.raises(ModelFileError, match=message):
                DeviceWeights(Checkpoint.open(tmp_path), device="cpu", kv_scales=True)
            continue
        weights = DeviceWeights(Checkpoint.open(tmp_path), device="cpu", kv_scales=True)
        q, k = (weights.load_vector(f"{at}.{name}_norm.weight", 8, offset=1.0) for name in ("q", "k"))
        matrix = weights.stack([(f"{at}.k_proj.weight", 64)], 64)
        weights.finish(".*")
        assert q.tolist() == [8.0] * 8 and k.tolist() == [0.5] * 8
        assert torch.equal(matrix, tensors[f"{at}.k_proj.weight"])


@pytest.mark.parametrize("name", ["int4 zeros", "gptq order", "awq", "float block", "modelopt nvfp4"])
def test_same_logits_as_the_values(name: str, tmp_path: Path) -> None:
    """A model with quantised layers computes the bits of one with their values."""
    plain = tiny.write(tmp_path / "plain", tiny.config("qwen3", hidden_size=64, intermediate_size=96, head_dim=16))
    stored = load_file(plain / "model.safetensors")
    tensors = {key: value.bfloat16() for key, value in stored.items() if not key.endswith("_proj.weight")}
    values = dict(tensors)
    for key in stored.keys() - tensors.keys():
        packed, exact = FORMATS[name].pack(stored[key])
        tensors |= {f"{key.removesuffix('weight')}{part}": tensor for part, tensor in packed.items()}
        values[key] = exact.bfloat16()
    config = json.loads((plain / "config.json").read_text())
    tiny.write_tensors(plain, config, values)
    narrow = tmp_path / "narrow"
    tiny.write_tensors(narrow, config | {"quantization_config": FORMATS[name].config}, tensors)
    tokens = prompts(20)
    logits = [Cache(load_decoder(directory), tokens).step([20]) for directory in (plain, narrow)]
    assert torch.equal(*logits)


BAD: list[tuple[str, str, Any, str]] = [
    ("int4", "weight_scale", torch.ones(ROWS, 3), "weight_scale' in .* has the dtype F32 and the shape"),
    ("int4", "weight_scale", torch.full((ROWS, 2), float("nan")), "scales of tensor 'x.weight'.* NaN"),
    ("int4", "weight_scale", torch.full((ROWS, 2), float("inf")), "scales of tensor 'x.weight'.* infinite"),
    ("int4", "weight_shape", torch.tensor([48, 63]), "weight_shape"),
    ("int4", "weight_packed", torch.zeros(ROWS, 9, dtype=torch.int32), "whole groups of 32"),
    ("int4 zeros", "weight_zero_point", None, r"lacks the scales .*'x.weight_zero_point'"),
    ("int4 order", "weight_g_idx", torch.zeros(COLUMNS, dtype=torch.int32), "do not have 32 columns each"),
    ("gptq order", "g_idx", None, "lacks the scales .*'x.g_idx'"),
    ("gptq", "scales", torch.ones(2, 40, dtype=torch.float16), "scales' in .* has the dtype"),
    ("awq", "qzeros", torch.ones(2, 5, dtype=torch.int32), "qzeros' in .* has the dtype"),
    ("fp8 block", "weight_scale_inv", None, "lacks the scales .*'x.weight_scale_inv'"),
    ("fp8 block", "weight_scale_inv", torch.ones(2, 2), "weight_scale_inv' in .* has the dtype"),
    ("float channel", "weight_scale", torch.full((ROWS, 1), float("nan")), "scales of tensor 'x.weight'.* NaN"),
    ("nvfp4", "weight_global_scale", torch.zeros(1), "global scale of tensor 'x.weight'"),
    ("nvfp4", "weight_global_scale", torch.tensor([1e-42]), "global scale of tensor 'x.weight'"),
    ("mxfp4", "weight_scale", torch.full((ROWS, 2), 255, dtype=torch.uint8), "scales of tensor 'x.weight'.* NaN"),
]


@pytest.mark.parametrize(("name", "part", "value", "message"), BAD, ids=lambda value: str(value)[:20])
def test_bad_tensors_are_named(name: str, part: str, value: Tensor | None, message: str, tmp_path: Path) -> None:
    packed, _ = FORMATS[name].pack(random_matrix(1))
    tensors = {f"x.{key}": tensor for key, tensor in packed.items()}
    tensors.pop(f"x.{part}")
    tensors |= {} if value is None else {f"x.{part}": value}
    tiny.write_tensors(tmp_path, tiny.config("qwen3", quantization_config=FORMATS[name].config), tensors)
    with pytest.raises(ModelFileError, match=message):
        Weights(Checkpoint.open(tmp_path)).load_matrix("x.weight", ROWS, COLUMNS)


ZERO_SCALES: list[tuple[str, str, Tensor]] = [
    ("int4", "weight_scale", torch.zeros(ROWS, 2)),
    ("float channel", "weight_scale", torch.zeros(ROWS, 1)),
    ("modelopt nvfp4", "weight_scale_2", torch.zeros(1)),
]


@pytest.mark.parametrize(("name", "part", "value"), ZERO_SCALES, ids=lambda value: str(value)[:20])
def test_scales_of_zero_are_of_groups_of_zeros(name: str, part: str, value: Tensor, tmp_path: Path) -> None:
    packed, _ = FORMATS[name].pack(random_matrix(1))
    assert part in packed
    tensors = {f"x.{key}": tensor for key, tensor in packed.items()} | {f"x.{part}": value}
    tiny.write_tensors(tmp_path, tiny.config("qwen3", quantization_config=FORMATS[name].config), tensors)
    assert not Weights(Checkpoint.open(tmp_path)).load_matrix("x.weight", ROWS, COLUMNS).any()


def test_codes_of_another_kind_are_named(tmp_path: Path) -> None:
    packed, _ = FORMATS["int4"].pack(random_matrix(1))
    config = tiny.config("qwen3", quantization_config=FORMATS["float channel"].config)
    tiny.write_tensors(tmp_path, config, {f"x.{key}": tensor for key, tensor in packed.items()})
    with pytest.raises(
        UnsupportedModel, match=r"'x.weight_packed' has int4 codes, but quantization_config describes fp8"
    ):
        Weights(Checkpoint.open(tmp_path))


@pytest.mark.parametrize("name", ["int4 zeros", "fp8 block", "mxfp4"])
def test_sizes_that_ranks_will_load(name: str, tmp_path: Path, keeping: list[QuantisedMatrix]) -> None:
    """They are known before anything is loaded."""
    checkpoint = Checkpoint.open(write_published(tmp_path, name, layers=2))
    model = ModelConfig.from_checkpoint(checkpoint)
    settings = EngineConfig.build(str(tmp_path)).with_gpu_defaults()
    for shard, stage in ((Shard(1, 2), Stage.from_config(model)), (Shard(), Stage.from_config(model, 1, 2))):
        comm = None if shard.is_whole else LoneRank(shard.rank, shard.world_size)
        weights = DeviceWeights(checkpoint, device="cpu", shard=shard, comm=comm)
        load_model(shard.shard_config(model), weights, 64, stage)
        found = estimate_rank_quantised_sizes(checkpoint, model, settings, "bfloat16", shard, stage)
        counts = (sum(s.rows * s.columns * s.num_matrices for s in sizes) for sizes in (weights.quantised_sizes, found))
        loaded, estimated = counts
        assert loaded == estimated > 0 and all(size.num_bytes > 0 for size in found) and not keeping
